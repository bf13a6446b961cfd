"""A run in words: what was asked, who still knows it, what that means; hypotheses and verdicts."""

from __future__ import annotations

from collections.abc import Iterator

from ..tables import TextTable
from .evaluation import TITLE_OF
from .memories import SOFTMAX
from .report import difference_text, who_learned
from .scores import Scores
from .streams import LEVELS
from .verdict import Claim

KNOWS = 0.5  # share of whole answers
FACTS = {1: "a 7-digit number in repeated sentences", 2: "a 7-digit number in prose", 3: "a uuid in prose"}


def sentences(scores: Scores) -> list[str]:
    """Three: the question, the memories that answer it at the greatest length, the limits of the conclusion."""
    far = scores.lengths[-1]
    facts = _listed([f"{FACTS[level]} (level {level})" for level in scores.levels])
    asked = (
        f"Asked: each memory read texts of up to {far:,} tokens with one fact in each, {facts}, and had to recall "
        f"every character of it at the end ({scores.streams} texts a cell)."
    )
    knowing = "; ".join(f"{FACTS[level]} {_knowing(scores, level, far)}" for level in scores.levels)
    best = ", each memory with its best gate set" if len(scores.gate_sets) > 1 and scores.learned else ""
    known = f"Known: at {far:,} tokens at least half of the facts are recalled{best}: {knowing}."
    return [asked, known, _meaning(scores, far)]


def _knowing(scores: Scores, level: int, length: int) -> str:
    shares = {memory: max(_shares(scores, memory, level, length)) for memory in _memories(scores)}
    knowing = sorted((memory for memory in shares if shares[memory] >= KNOWS), key=lambda memory: -shares[memory])
    return "by " + (", ".join(f"{TITLE_OF[memory]} ({100 * shares[memory]:.0f} %)" for memory in knowing) or "none")


def _meaning(scores: Scores, far: int) -> str:
    means = "a state of fixed size keeps some facts and loses others"
    if SOFTMAX in _memories(scores):
        least = min(max(_shares(scores, SOFTMAX, level, far)) for level in scores.levels)
        share = "all" if least == 1 else f"{100 * least:.0f} %"
        means = f"softmax attention recalls {share} of them with the same keys and values, so " + (
            "a memory that does not has lost them from its state" if least >= KNOWS else "the keys lose facts too"
        )
    gates = "gates that see the class of a token alone" if scores.learned else "gates set by hand"
    return (
        f"Means: {means}; it does not mean that trained models rank like this: one layer, one head, fixed random "
        f"keys and values, {gates} ({who_learned(scores)})."
    )


def overview(scores: Scores) -> TextTable:
    """A row per memory: what is learned in it, and its share of whole answers at the greatest length by level."""
    far, several = scores.lengths[-1], len(scores.gate_sets) > 1
    rows = []
    for memory in _memories(scores):
        cells = [_range(_shares(scores, memory, level, far)) for level in scores.levels]
        rows.append([TITLE_OF[memory], "gates learned" if memory in scores.learned else "nothing learned", *cells])
    title = (f"Whole answers right at {far:,} tokens, %{', least and most of the gate sets' if several else ''} "
             f"{', '.join(scores.gate_sets)}").rstrip()  # fmt: skip
    return TextTable(title, ["memory", "", *(f"level {level}: {LEVELS[level]}" for level in scores.levels)], rows)


def _range(shares: list[float]) -> str:
    low, high = f"{100 * min(shares):.0f}", f"{100 * max(shares):.0f}"
    return low if low == high else f"{low} to {high}"


def _shares(scores: Scores, memory: str, level: int, length: int) -> list[float]:
    """The share of whole answers with each gate set that has the memory."""
    sets: list[str | None] = [name for name in scores.gate_sets if memory in scores.memories(name)]
    return [float(scores.exact(gates, memory, level, length).mean()) for gates in sets or [None]]


def _memories(scores: Scores) -> list[str]:
    return list(dict.fromkeys(score.memory for score in scores.all))


def verdict_lines(claims: list[Claim]) -> Iterator[tuple[str, str]]:
    """(indent, text): a hypothesis, then its predictions with their verdicts; pairs that decide, else the others."""
    for hypothesis in dict.fromkeys(claim.hypothesis for claim in claims):
        yield "", hypothesis
        about = [claim for claim in claims if claim.hypothesis == hypothesis]
        about = [claim for claim in about if claim.decides] or about
        for claim in {(c.prediction, c.where): c for c in about}.values():
            differ = f"they differ in {' and '.join(claim.differ_in)}"
            differ += " alone" if claim.decides else ", so this decides nothing"
            found = [c for c in about if (c.prediction, c.where) == (claim.prediction, claim.where)]
            words = dict.fromkeys(c.found.word for c in found)
            outcome = "; ".join(
                f"{word.upper()} with gates from "
                + ", ".join(f"{c.gates} ({difference_text(c)})" for c in found if c.found.word == word)
                for word in words
            )
            yield "  ", f"{claim.prediction} ({claim.where}; {differ}): {outcome}"


def _listed(words: list[str]) -> str:
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
