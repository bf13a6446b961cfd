"""Tests of published conclusions by paired comparisons of memories.

The conclusions are those of the Gated DeltaNet paper (Yang, Kautz, Hatamizadeh, 2024) on needles in a haystack:
decay hurts retention; gating filters; the delta rule memorises more, and the gated delta rule is best. Pairs of
memories that differ in a single property decide; other pairs are reported separately. The expected direction of a
difference is given, its outcome is measured.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from ..statistics import Difference, paired_difference
from .scores import Scores

CAUTION = (
    "One memory, one head, fixed keys, gates that see a token class: a study of the recurrences, "
    "not a replication of trained models."
)
LEAST, EQUIVALENT = 0.05, 0.10  # fractions of exact answers
LEAST_LOSS, EQUIVALENT_LOSS = 0.001, 0.002  # nats per token


@dataclass(frozen=True)
class Pair:
    """`more` is claimed to be correct more often than `less`; `where` selects a length: near, middle or far."""

    conclusion: str
    says: str
    more: str
    less: str
    level: int
    where: str
    differ_in: tuple[str, ...]

    @property
    def decides(self) -> bool:
        """True if a single property differs."""
        return len(self.differ_in) == 1


HURTS, FILTERS, MEMORISES, BEST = (
    "1 decay hurts retention",
    "2 gating filters, the delta rule alone does not",
    "3 the delta rule memorises more",
    "4 gated delta is best",
)
PAIRS = (
    Pair(HURTS, "without decay the delta rule keeps more", "delta", "gated_delta", 1, "far", ("decay",)),
    Pair(HURTS, "the delta rule keeps what mamba2 loses", "delta", "mamba2", 1, "far", ("decay", "erasing")),
    Pair(HURTS, "erasing helps where decay is learned", "gated_delta", "mamba2", 1, "far", ("erasing", "untied gates")),
    Pair(FILTERS, "a write gate filters, adding", "write_gate", "linear", 2, "middle", ("write gate",)),
    Pair(FILTERS, "a write gate filters, erasing", "delta", "delta_one", 2, "middle", ("write gate",)),
    Pair(FILTERS, "a decay gate filters", "gated_delta", "delta", 2, "middle", ("decay",)),
    Pair(FILTERS, "adding holds longer than erasing", "write_gate", "delta", 2, "far", ("erasing",)),
    Pair(FILTERS, "mamba2 holds longer than the delta rule", "mamba2", "delta", 2, "far", ("decay", "erasing")),
    Pair(MEMORISES, "erasing memorises more", "delta", "write_gate", 3, "near", ("erasing",)),
    Pair(MEMORISES, "the delta rule memorises more than mamba2", "delta", "mamba2", 3, "near", ("decay", "erasing")),
    Pair(BEST, "decay on top of the delta rule helps", "gated_delta", "delta", 3, "near", ("decay",)),
    Pair(BEST, "better than mamba2", "gated_delta", "mamba2", 3, "near", ("erasing", "untied gates")),
)
PREDICTS = (("mamba2", ("erasing", "untied gates")), ("delta", ("decay",)))  # memories whose held-out loss is compared


@dataclass(frozen=True)
class Claim:
    """One comparison under one gate set, and its outcome."""

    gates: str
    conclusion: str
    says: str
    comparison: str
    differ_in: tuple[str, ...]
    found: Difference
    unit: str = "of whole answers"

    @property
    def decides(self) -> bool:
        """True if a single property differs."""
        return len(self.differ_in) == 1


def verdict(scores: Scores) -> list[Claim]:
    """Every claim that the memories, levels and gate sets of a run can decide, ordered by conclusion."""
    decided = [
        claim
        for gates in scores.gate_sets
        for claims in (needle_claims, length_claims, loss_claims)
        for claim in claims(scores, gates)
    ]
    return sorted(decided, key=lambda claim: claim.conclusion)


def needle_claims(scores: Scores, gates: str) -> Iterator[Claim]:
    """Memory against memory at one length, paired by stream."""
    at = picked_lengths(scores)
    for pair in PAIRS:
        if {pair.more, pair.less} <= tested(scores, gates) and pair.level in scores.levels:
            length = at[pair.where]
            more, less = (scores.exact(gates, memory, pair.level, length) for memory in (pair.more, pair.less))
            comparison = f"{pair.more} - {pair.less}, level {pair.level}, {length}"
            difference = paired_difference(more - less, LEAST, EQUIVALENT)
            yield Claim(gates, pair.conclusion, pair.says, comparison, pair.differ_in, difference)


def length_claims(scores: Scores, gates: str) -> Iterator[Claim]:
    """The delta rule against itself at another length."""
    if "delta" in tested(scores, gates) and 2 in scores.levels and len(scores.lengths) > 1:
        at = picked_lengths(scores)
        near, far = (scores.exact(gates, "delta", 2, at[where]) for where in ("near", "far"))
        comparison = f"delta at {at['near']} - at {at['far']}, level 2"
        difference = paired_difference(near - far, LEAST, EQUIVALENT)
        yield Claim(gates, FILTERS, "new keys overwrite what the delta rule holds", comparison, ("length",), difference)


def loss_claims(scores: Scores, gates: str) -> Iterator[Claim]:
    """Held-out loss of the gated delta rule against other memories."""
    for other, differ_in in PREDICTS:
        if {"gated_delta", other} <= tested(scores, gates):
            x = scores.losses(gates, other) - scores.losses(gates, "gated_delta")
            difference = paired_difference(x, LEAST_LOSS, EQUIVALENT_LOSS)
            comparison = f"held-out loss, {other} - gated_delta"
            yield Claim(gates, BEST, "it predicts text better", comparison, differ_in, difference, "nats per token")


def tested(scores: Scores, gates: str) -> set[str]:
    """The memories that can be compared under a gate set."""
    return {*scores.memories(gates), *scores.memories(None)}


def picked_lengths(scores: Scores) -> dict[str, int]:
    """The shortest, the upper middle and the longest length of the run."""
    lengths = scores.lengths
    return {"near": lengths[0], "middle": lengths[len(lengths) // 2], "far": lengths[-1]}
