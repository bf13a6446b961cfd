"""The tables of a run, and its results as JSON."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

import linattn_np as la

from ..files import reading
from ..tables import TextTable, markdown_table
from .evaluation import TITLE_OF, Score
from .gates import decode, encode
from .memories import sigmoid, softplus
from .scores import Scores
from .streams import LEVELS
from .text import CLASSES
from .verdict import CAUTION, WORDS, Claim

NUMBERS: dict[str, tuple[str, Callable[[np.ndarray], np.ndarray]]] = {
    "head_decay": ("decays of the heads", lambda x: np.exp(-softplus(x))),
    "ridge": ("ridge", softplus),
    "spread": ("spread of the decay over the channels", lambda x: x),
}
Cell = Callable[[str | None, str, int, int], str]
HELP = "pydoc_data.topics, second half"


def write_markdown(path: Path, scores: Scores, claims: list[Claim]) -> None:
    """Write all tables as a Markdown page."""
    path.write_text("\n".join([*map(markdown_table, tables(scores, claims)), WORDS, "", CAUTION, ""]), "utf8")


def tables(scores: Scores, claims: list[Claim]) -> Iterator[TextTable]:
    """Answers, characters and vote statistics by level; what was learned; the verdict."""
    kinds: tuple[tuple[str, Cell], ...] = (
        (f"whole answer right, 95 % interval, {scores.streams} streams a cell", lambda *at: interval_text(scores, *at)),
        ("characters right", lambda *at: f"{scores.characters(*at).mean():.2f}"),
        ("needle's own vote / spread of all other votes / size of the state", lambda *at: votes_text(scores, *at)),
    )
    for what, cell in kinds:
        for level in scores.levels:
            yield level_table(scores, level, f"Level {level} ({LEVELS[level]}): {what}; {who_learned(scores)}", cell)
    if scores.gate_sets:
        yield gates_table(scores)
        numbers = numbers_table(scores)
        if numbers.rows:
            yield numbers
    for decide in (True, False):
        if any(claim.decides == decide for claim in claims):
            yield claims_table(claims, list(scores.gate_sets), decide)


def who_learned(scores: Scores) -> str:
    """The memories with learned gates, and those in which nothing is learned."""
    learned, fixed = ([TITLE_OF[memory] for memory in names] for names in (scores.learned, scores.memories(None)))
    return "; ".join(
        [
            *([f"gates learned: {', '.join(learned)}"] if learned else []),
            *([f"nothing learned: {', '.join(fixed)}"] if fixed else []),
        ]
    )


def level_table(scores: Scores, level: int, title: str, cell: Cell) -> TextTable:
    """One level: a row per memory, those without learned gates first; a column per length."""
    rows = []
    for gates in (None, *scores.gate_sets):
        for memory in scores.memories(gates):
            cells = [cell(gates, memory, level, length) for length in scores.lengths]
            rows.append(["nothing learned" if gates is None else gates, TITLE_OF[memory], *cells])
    return TextTable(title, ["gates", "memory", *map(str, scores.lengths)], rows, sections=True)


def interval_text(scores: Scores, gates: str | None, memory: str, level: int, length: int) -> str:
    """Fraction and interval: 0.95 (0.85 0.98)."""
    share, low, high = scores.interval(gates, memory, level, length)
    return f"{share:.2f} ({low:.2f} {high:.2f})"


def votes_text(scores: Scores, gates: str | None, memory: str, level: int, length: int) -> str:
    """Signal, noise and norm of the state."""
    votes = scores.votes(gates, memory, level, length)
    return "-" if votes is None else f"{votes[0]:.3f} / {votes[1]:.3f} / {votes[2]:.0f}"


def gates_table(scores: Scores) -> TextTable:
    """Learned gates, means over the seeds: write strengths and decays by class, held-out loss."""
    rows = []
    for gates in scores.gate_sets:
        for memory in scores.memories(gates):
            loss = f"{scores.losses(gates, memory).mean():.4f}"
            for kind, values in gate_values(scores, gates, memory).items():
                form = ".5f" if kind == "decay" else ".3f"
                rows.append([gates, TITLE_OF[memory], kind, *(f"{x:{form}}" for x in values), loss])
    title = "Learned gates: write strength and decay of a token by its class"
    return TextTable(title, ["gates", "memory", "gate", *CLASSES, "loss"], rows, left=3, sections=True)


def numbers_table(scores: Scores) -> TextTable:
    """Learned numbers that hold for tokens of all classes, means over the seeds."""
    rows = []
    for gates in scores.gate_sets:
        for memory in scores.memories(gates):
            loss = f"{scores.losses(gates, memory).mean():.4f}"
            for name, values in number_values(scores, gates, memory).items():
                rows.append([gates, TITLE_OF[memory], name, ", ".join(f"{x:.5f}" for x in values), loss])
    title = "Learned numbers of all tokens"
    return TextTable(title, ["gates", "memory", "number", "value", "loss"], rows, left=4, sections=True)


def number_values(scores: Scores, gates: str, memory: str) -> dict[str, np.ndarray]:
    """Means over the seeds of the learned numbers that hold for tokens of all classes, by name."""
    learned = [memories[memory].logits for memories in scores.gate_sets[gates].values()]
    return {name: np.mean([of_logits(logits[part]) for logits in learned], axis=0)
            for part, (name, of_logits) in NUMBERS.items() if part in learned[0]}  # fmt: skip


def gate_values(scores: Scores, gates: str, memory: str) -> dict[str, np.ndarray]:
    """Mean write strength and mean decay factor per token (5,), by class."""
    by_kind: dict[str, list[np.ndarray]] = {}
    for memories in scores.gate_sets[gates].values():
        logits = memories[memory].logits
        if "write" in logits:
            by_kind.setdefault("write", []).append(np.broadcast_to(sigmoid(logits["write"]), (len(CLASSES),)))
        if "decay" in logits:
            by_kind.setdefault("decay", []).append(np.exp(-softplus(logits["decay"])))
        if "dt" in logits:
            dt = softplus(logits["dt"])
            by_kind.setdefault("write", []).append(dt)
            by_kind.setdefault("decay", []).append(np.exp(-np.exp(logits["log_A"]) * dt))
    return {kind: np.mean(values, axis=0) for kind, values in by_kind.items()}


def claims_table(claims: list[Claim], gate_sets: list[str], decide: bool) -> TextTable:
    """A row per prediction, a column per gate set: verdict, paired difference, half-width of its 95 % interval."""
    title = "one thing: these decide" if decide else "more than one thing: these explain nothing alone"
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    for claim in claims:
        if claim.decides == decide:
            cells = (claim.hypothesis, claim.prediction, claim.where, " and ".join(claim.differ_in))
            rows.setdefault(cells, {})[claim.gates] = found_text(claim)
    columns = ["hypothesis", "prediction", "tested at", "differ in", *gate_sets]
    lines = [[*row, *(by_set.get(name, "-") for name in gate_sets)] for row, by_set in rows.items()]
    return TextTable(f"Pairs that differ in {title}", columns, lines, left=len(columns), sections=True)


def found_text(claim: Claim) -> str:
    """For example: supported +0.91 ± 0.08; losses with their unit."""
    return f"{claim.found.word} {difference_text(claim)}"


def difference_text(claim: Claim) -> str:
    """Difference and half-width of its interval."""
    difference = claim.found
    if np.isinf(difference.half_width):
        return f"{difference.mean:+.4f}, one seed: no interval"
    if claim.unit == "of whole answers":
        return f"{difference.mean:+.2f} ± {difference.half_width:.2f}"
    return f"{difference.mean:+.4f} ± {difference.half_width:.4f} nats"


def about_run(scores: Scores) -> dict[str, Any]:
    """Settings and versions."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "linattn_np": la.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "machine": platform.machine(),
        "text": scores.text or HELP,
        "streams_per_cell": scores.streams,
    }


def as_json(scores: Scores, claims: list[Claim], run: dict[str, Any]) -> dict[str, Any]:
    """All measured values, rounded, and the settings and versions of the run."""
    return {
        "about": CAUTION,
        "run": run,
        "depths": [round(depth, 3) for depth in scores.depths],
        "scores": [{key: rounded(x) for key, x in asdict(score).items()} for score in scores.all],
        "gates": {
            name: {seed: {memory: encode(x) for memory, x in memories.items()} for seed, memories in gate_set.items()}
            for name, gate_set in scores.gate_sets.items()
        },
        "verdict": [
            {
                **asdict(claim),
                "found": {k: rounded(x) for k, x in asdict(claim.found).items()},
                "decides": claim.decides,
            }
            for claim in claims
        ],
    }


def rounded(x: Any) -> Any:
    """Numbers rounded to 4 decimal places, inf as None, booleans in lists as 0 and 1; other values unchanged."""
    if isinstance(x, list):
        return [int(y) if isinstance(y, bool) else rounded(y) for y in x]
    if isinstance(x, float):
        return round(x, 4) if np.isfinite(x) else None
    return x


def summary(scores: Scores, claims: list[Claim], run: dict[str, Any]) -> dict[str, Any]:
    """The figures of the tables: a row per gate set and memory, lists by level and length, and a row per prediction."""
    predictions: dict[tuple[str, ...], dict[str, Any]] = {}
    for claim in claims:
        about = {n: x for n, x in asdict(claim).items() if n not in ("gates", "found")} | {"decides": claim.decides}
        row = predictions.setdefault((claim.hypothesis, claim.prediction, claim.where), about)
        row[claim.gates] = {n: rounded(x) for n, x in asdict(claim.found).items()}
    memories = [_memory(scores, gates, name) for gates in (None, *scores.gate_sets) for name in scores.memories(gates)]
    return {"about": CAUTION, "run": run, "levels": scores.levels, "lengths": scores.lengths,
            "votes": "signal, noise, size of the state", "memories": memories,
            "verdict": list(predictions.values())}  # fmt: skip


def _memory(scores: Scores, gates: str | None, name: str) -> dict[str, Any]:
    """Shares of whole answers and of characters, votes, and the learned gates of a memory."""
    table = lambda of: [[rounded(of(gates, name, level, n)) for n in scores.lengths] for level in scores.levels]  # noqa: E731
    row: dict[str, Any] = {
        "gates": gates,
        "memory": name,
        "exact": table(lambda *at: float(scores.exact(*at).mean())),
        "characters": table(lambda *at: float(scores.characters(*at).mean())),
        "votes": table(lambda *at: [*map(float, scores.votes(*at) or ())]),
    }
    if gates is not None:
        row["loss"] = round(float(scores.losses(gates, name).mean()), 4)
        learned = gate_values(scores, gates, name) | number_values(scores, gates, name)
        row |= {kind: np.round(x, 5).tolist() for kind, x in learned.items()}
    return row


def write_json(path: Path, parts: dict[str, Any]) -> None:
    """Write the results or their summary as JSON, a score, memory or prediction per line."""
    lines = []
    for key, part in parts.items():
        if key in ("scores", "memories", "verdict"):
            rows = ",\n  ".join(json.dumps(row) for row in part)
            lines.append(f"{json.dumps(key)}: [\n  {rows}\n ]")
        else:
            lines.append(f"{json.dumps(key)}: {json.dumps(part)}")
    path.write_text("{\n " + ",\n ".join(lines) + "\n}\n", "utf8")


def read_json(path: Path) -> tuple[Scores, dict[str, Any]]:
    """The scores of `as_json` in a file, and the settings and versions of their run."""
    with reading(path, "results of linattn recall"):
        parts = json.loads(path.read_text("utf8"))
        gate_sets = {name: {int(seed): decode(memories) for seed, memories in gate_set.items()}
                     for name, gate_set in parts["gates"].items()}  # fmt: skip
        text = parts["run"]["text"]
        scores = Scores(
            [Score(**score) for score in parts["scores"]],
            tuple(parts["depths"]),
            gate_sets,
            None if text == HELP else text,
        )
        known = [score.memory in TITLE_OF and len(score.exact) == len(scores.depths) for score in scores.all]
        if not known or not all(known):
            raise ValueError(f"{sum(known)} of {len(known)} scores have a known memory and {len(scores.depths)} depths")
    return scores, parts["run"]
