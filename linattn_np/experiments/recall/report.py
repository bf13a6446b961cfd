"""The results of a run as tables on a terminal, as Markdown and as JSON."""

import io
import json
import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import linattn_np as la

from .gates import encode
from .memories import sigmoid, softplus
from .scores import Scores
from .streams import LEVELS
from .text import CLASSES
from .verdict import CAUTION, Claim

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

Cell = Callable[[str | None, str, int, int], str]


def print_report(scores: Scores, claims: list[Claim], console: "Console") -> None:
    """Print all tables to a terminal."""
    for table in tables(scores, claims):
        console.print(table)
    console.print(CAUTION, highlight=False)


def write_markdown(path: Path, scores: Scores, claims: list[Claim]) -> None:
    """Write all tables as a Markdown page."""
    from rich import box
    from rich.console import Console

    page = io.StringIO()
    console = Console(file=page, width=500)
    for table in tables(scores, claims):
        page.write(f"**{table.title}**\n")
        table.title, table.box = None, box.MARKDOWN
        for row in table.rows:
            row.end_section = False
        console.print(table)
    lines = [line.rstrip() for line in page.getvalue().splitlines()]
    path.write_text("\n".join([*lines, CAUTION, ""]), "utf8")


def tables(scores: Scores, claims: list[Claim]) -> Iterator["Table"]:
    """Answers, characters and vote statistics by level; the learned gates; the verdict."""
    kinds: tuple[tuple[str, Cell], ...] = (
        (f"whole answer right, 95 % interval, {scores.streams} streams a cell", lambda *at: interval_text(scores, *at)),
        ("characters right", lambda *at: f"{scores.characters(*at).mean():.2f}"),
        ("needle's own vote / spread of all other votes / size of the state", lambda *at: votes_text(scores, *at)),
    )
    for what, cell in kinds:
        for level in scores.levels:
            yield level_table(scores, level, f"Level {level} ({LEVELS[level]}): {what}", cell)
    if scores.gate_sets:
        yield gates_table(scores)
    if claims:
        for decide in (True, False):
            yield claims_table(claims, list(scores.gate_sets), decide)


def level_table(scores: Scores, level: int, title: str, cell: Cell) -> "Table":
    """One level: a row per memory, those without learned gates first; a column per length."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    table.add_column("gates")
    table.add_column("memory")
    for length in scores.lengths:
        table.add_column(str(length), justify="right")
    for gates in (None, *scores.gate_sets):
        for memory in scores.memories(gates):
            row = [cell(gates, memory, level, length) for length in scores.lengths]
            table.add_row("none learned" if gates is None else gates, memory, *row)
        table.add_section()
    return table


def interval_text(scores: Scores, gates: str | None, memory: str, level: int, length: int) -> str:
    """Fraction and interval: 0.95 (0.85 0.98)."""
    share, low, high = scores.interval(gates, memory, level, length)
    return f"{share:.2f} ({low:.2f} {high:.2f})"


def votes_text(scores: Scores, gates: str | None, memory: str, level: int, length: int) -> str:
    """Signal, noise and norm of the state."""
    votes = scores.votes(gates, memory, level, length)
    return "-" if votes is None else f"{votes[0]:.3f} / {votes[1]:.3f} / {votes[2]:.0f}"


def gates_table(scores: Scores) -> "Table":
    """Learned gates, means over the seeds: write strengths and decays by class, held-out loss."""
    from rich.table import Table

    table = Table(title="Learned gates: write strength and decay of a token by its class", title_justify="left")
    for name in ("gates", "memory", "gate", *CLASSES, "loss"):
        table.add_column(name, justify="right" if name in (*CLASSES, "loss") else "left")
    for gates in scores.gate_sets:
        for memory in scores.memories(gates):
            loss = f"{scores.losses(gates, memory).mean():.4f}"
            for kind, values in gate_values(scores, gates, memory).items():
                form = ".5f" if kind == "decay" else ".3f"
                table.add_row(gates, memory, kind, *(f"{x:{form}}" for x in values), loss)
        table.add_section()
    return table


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


def claims_table(claims: list[Claim], gate_sets: list[str], decide: bool) -> "Table":
    """A row per claim, a column per gate set: conclusion, paired difference, half-width of its 95 % interval."""
    from rich.table import Table

    title = "one thing: these decide" if decide else "more than one thing: these explain nothing alone"
    table = Table(title=f"Pairs that differ in {title}", title_justify="left")
    for name in ("conclusion", "comparison", "differ in", *gate_sets):
        table.add_column(name)
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    for claim in claims:
        if claim.decides == decide:
            cells = (claim.conclusion, f"{claim.says}: {claim.comparison}", " and ".join(claim.differ_in))
            rows.setdefault(cells, {})[claim.gates] = found_text(claim)
    for row, by_set in rows.items():
        table.add_row(*row, *(by_set.get(name, "-") for name in gate_sets))
    return table


def found_text(claim: Claim) -> str:
    """For example: shows +0.91 ± 0.08; losses with their unit."""
    difference = claim.found
    if claim.unit == "of whole answers":
        return f"{difference.word} {difference.mean:+.2f} ± {difference.half_width:.2f}"
    return f"{difference.word} {difference.mean:+.4f} ± {difference.half_width:.4f} nats"


def as_json(scores: Scores, claims: list[Claim], run: dict[str, Any]) -> dict[str, Any]:
    """All measured values, rounded, with the settings and versions of the run; `run` adds to these."""
    return {
        "about": CAUTION,
        "run": {
            "date": datetime.now(UTC).date().isoformat(),
            "linattn_np": la.__version__,
            "python": platform.python_version(),
            "numpy": np.__version__,
            "machine": platform.machine(),
            "text": scores.text or "pydoc_data.topics, second half",
            "streams_per_cell": scores.streams,
            **run,
        },
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
    """Numbers rounded to 4 decimal places, booleans in lists as 0 and 1; other values unchanged."""
    if isinstance(x, list):
        return [int(y) if isinstance(y, bool) else rounded(y) for y in x]
    return round(x, 4) if isinstance(x, float) else x


def write_json(path: Path, scores: Scores, claims: list[Claim], run: dict[str, Any]) -> None:
    """Write the results as JSON, one score per line."""
    parts = as_json(scores, claims, run)
    lines = []
    for key, part in parts.items():
        if key in ("scores", "verdict"):
            rows = ",\n  ".join(json.dumps(row) for row in part)
            lines.append(f"{json.dumps(key)}: [\n  {rows}\n ]")
        else:
            lines.append(f"{json.dumps(key)}: {json.dumps(part)}")
    path.write_text("{\n " + ",\n ".join(lines) + "\n}\n", "utf8")
