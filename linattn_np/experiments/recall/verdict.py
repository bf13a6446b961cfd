"""Tests of published claims by paired comparisons of memories.

Hypotheses H1 to H4 are those of the Gated DeltaNet paper (Yang, Kautz, Hatamizadeh, 2024) on needles in a haystack, H5
that of the MesaNet paper (von Oswald et al., 2025), that the least-squares fit is better than one step towards it.
Pairs of memories that differ in a single property decide; other pairs are reported separately. The expected direction
of a difference is given, its outcome is measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..statistics import Difference, paired_difference
from .evaluation import TITLE_OF
from .scores import Scores

CAUTION = (
    "One memory, one head, fixed keys, gates that see a token class: a study of the recurrences, "
    "not a replication of trained models."
)
LEAST, EQUIVALENT = 0.05, 0.10  # fractions of exact answers
LEAST_LOSS, EQUIVALENT_LOSS = 0.001, 0.002  # nats per token
WORDS = (
    f"Verdicts on 'A recalls more than B' are about A - B in whole answers, with its 95 % interval. supported: above 0 "
    f"and at least {LEAST:.2f}; contradicted: B recalls more, by as much; no difference: within {EQUIVALENT:.2f} of 0; "
    f"inconclusive: none of these. Losses: the same with {LEAST_LOSS} and {EQUIVALENT_LOSS} nats."
)


@dataclass(frozen=True)
class Pair:
    """`more` is predicted to be correct more often than `less`; `where` selects a length: near, middle or far."""

    hypothesis: str
    more: str
    less: str
    level: int
    where: str
    differ_in: tuple[str, ...]

    @property
    def decides(self) -> bool:
        """True if a single property differs."""
        return len(self.differ_in) == 1


LOSES, FILTERS, HOLDS, BEST, FITS = (
    "H1: a decay makes a memory lose facts",
    "H2: gates keep a fact through long prose, the delta rule alone does not",
    "H3: a memory that erases holds longer answers",
    "H4: the gated delta rule is the best memory",
    "H5: a least-squares fit recalls more than one step of the delta rule",
)
FIT = "least-squares fit"
PAIRS = (
    Pair(LOSES, "delta", "gated_delta", 1, "far", ("decay",)),
    Pair(LOSES, "delta", "mamba2", 1, "far", ("decay", "erasing")),
    Pair(LOSES, "gated_delta", "mamba2", 1, "far", ("erasing", "untied gates")),
    Pair(FILTERS, "write_gate", "linear", 2, "middle", ("write gate",)),
    Pair(FILTERS, "delta", "delta_one", 2, "middle", ("write gate",)),
    Pair(FILTERS, "gated_delta", "delta", 2, "middle", ("decay",)),
    Pair(FILTERS, "write_gate", "delta", 2, "far", ("erasing",)),
    Pair(FILTERS, "mamba2", "delta", 2, "far", ("decay", "erasing")),
    Pair(HOLDS, "delta", "write_gate", 3, "near", ("erasing",)),
    Pair(HOLDS, "delta", "mamba2", 3, "near", ("decay", "erasing")),
    Pair(BEST, "gated_delta", "delta", 3, "near", ("decay",)),
    Pair(BEST, "gated_delta", "mamba2", 3, "near", ("erasing", "untied gates")),
    *(Pair(FITS, "mesa_net", less, level, where, (FIT, *decay))
      for less, decay in (("delta", ("decay",)), ("gated_delta", ()))
      for level, where in ((1, "far"), (2, "middle"), (3, "near"))),
)  # fmt: skip
PREDICTS = (  # the first memory is predicted to have the lower held-out loss
    (BEST, "gated_delta", "mamba2", ("erasing", "untied gates")),
    (BEST, "gated_delta", "delta", ("decay",)),
    (FITS, "mesa_net", "gated_delta", (FIT,)),
    (FITS, "mesa_net", "delta", (FIT, "decay")),
)


@dataclass(frozen=True)
class Claim:
    """One prediction under one gate set, and its outcome."""

    gates: str
    hypothesis: str
    prediction: str
    where: str
    differ_in: tuple[str, ...]
    found: Difference
    unit: str = "of whole answers"

    @property
    def decides(self) -> bool:
        """True if a single property differs."""
        return len(self.differ_in) == 1


def verdict(scores: Scores) -> list[Claim]:
    """Every claim that the memories, levels and gate sets of a run can decide, ordered by hypothesis."""
    decided = [
        claim
        for gates in scores.gate_sets
        for claims in (needle_claims, length_claims, loss_claims)
        for claim in claims(scores, gates)
    ]
    return sorted(decided, key=lambda claim: claim.hypothesis)


def needle_claims(scores: Scores, gates: str) -> Iterator[Claim]:
    """Memory against memory at one length, paired by stream."""
    at = picked_lengths(scores)
    for pair in PAIRS:
        if {pair.more, pair.less} <= tested(scores, gates) and pair.level in scores.levels:
            length = at[pair.where]
            more, less = (scores.exact(gates, memory, pair.level, length) for memory in (pair.more, pair.less))
            difference = paired_difference(more - less, LEAST, EQUIVALENT)
            prediction = f"{TITLE_OF[pair.more]} recalls more than {TITLE_OF[pair.less]}"
            where = f"level {pair.level}, {length} tokens"
            yield Claim(gates, pair.hypothesis, prediction, where, pair.differ_in, difference)


def length_claims(scores: Scores, gates: str) -> Iterator[Claim]:
    """The delta rule against itself at another length."""
    if "delta" in tested(scores, gates) and 2 in scores.levels and len(scores.lengths) > 1:
        at = picked_lengths(scores)
        near, far = (scores.exact(gates, "delta", 2, at[where]) for where in ("near", "far"))
        difference = paired_difference(near - far, LEAST, EQUIVALENT)
        prediction = f"{TITLE_OF['delta']} recalls more at {at['near']} tokens than at {at['far']}"
        yield Claim(gates, FILTERS, prediction, "level 2", ("length",), difference)


def loss_claims(scores: Scores, gates: str) -> Iterator[Claim]:
    """Held-out loss of one memory against that of another."""
    for hypothesis, better, other, differ_in in PREDICTS:
        if {better, other} <= tested(scores, gates):
            x = scores.losses(gates, other) - scores.losses(gates, better)
            difference = paired_difference(x, LEAST_LOSS, EQUIVALENT_LOSS)
            prediction = f"{TITLE_OF[better]} predicts prose better than {TITLE_OF[other]}"
            yield Claim(gates, hypothesis, prediction, "held-out loss", differ_in, difference, "nats per token")


def tested(scores: Scores, gates: str) -> set[str]:
    """The memories that can be compared under a gate set."""
    return {*scores.memories(gates), *scores.memories(None)}


def picked_lengths(scores: Scores) -> dict[str, int]:
    """The shortest, the upper middle and the longest length of the run."""
    lengths = scores.lengths
    return {"near": lengths[0], "middle": lengths[len(lengths) // 2], "far": lengths[-1]}
