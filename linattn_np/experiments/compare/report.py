"""The table of a comparison, its picture, its file."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..tables import TextTable
from .claims import CLAIMS, OPEN, verdict
from .results import Cell, Scores

Cells = Mapping[tuple[str, str], Cell]


def text_of(cell: Cell) -> str:
    """best +- half (rates that succeed / rates)"""
    width = "" if math.isnan(cell.half) else f" ±{cell.half:.2f}"
    return f"{cell.best:.2f}{width} ({cell.window[0]}/{cell.window[1]})"


def table(cells: Cells, tasks: Sequence[str], mixers: Sequence[str], counts: Mapping[str, int]) -> TextTable:
    """A row for each mixer, a column for each task."""
    rows = [[m, f"{counts[m]:,}", *(text_of(cells[t, m]) for t in tasks)] for m in mixers]
    return TextTable("", ["mixer", "parameters", *tasks], rows, left=1)


def claims(cells: Cells) -> TextTable:
    """A row for each claim of which both mixers were run."""
    found = [(c, verdict(c, cells)) for c in CLAIMS]
    rows = [[f"{c.text}: {c.better} > {c.worse}, {c.task}", c.source, word] for c, word in found if word != OPEN]
    return TextTable("", ["claim", "source", "verdict"], rows, left=3)


def document(scores: Scores, cells: Cells, about: Mapping[str, Any]) -> dict[str, Any]:
    """Everything as JSON; numbers that are not finite are null."""
    finite = lambda x: x if math.isfinite(x) else None  # noqa: E731
    runs = [{"task": j.task, "mixer": j.mixer, "rate": j.rate, "seed": j.seed, "score": finite(s.mean),
             "tests": {n: finite(x) for n, x in s.tests.items()}} for j, s in scores.items()]  # fmt: skip
    best = [{"task": t, "mixer": m, "best": finite(c.best), "half_width": finite(c.half), "rate": c.rate,
             "window": list(c.window)} for (t, m), c in cells.items()]  # fmt: skip
    return {**about, "best": best, "claims": {c.text: verdict(c, cells) for c in CLAIMS}, "runs": runs}


def write(path: Path, found: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n", "utf8")


def draw(path: Path, scores: Scores, cells: Cells, tasks: Sequence[str], mixers: Sequence[str]) -> None:
    """Above, the score of a task by learning rate; below, its tests at the best rate."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.4 * len(tasks) + 1.6, 6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, len(tasks), squeeze=False)
    for n, task in enumerate(tasks):
        for i, mixer in enumerate(mixers):
            cell = cells[task, mixer]
            rates = sorted(cell.by_rate)
            style = {"color": f"C{i % 10}", "marker": "os^v"[i // 10 % 4], "markersize": 3, "label": mixer}
            axes[0, n].plot(rates, [cell.by_rate[r] for r in rates], **style)
            best = [s for j, s in scores.items() if (j.task, j.mixer, j.rate) == (task, mixer, cell.rate)]
            names = list(best[0].tests)
            axes[1, n].plot(names, [sum(s.tests[t] for s in best) / len(best) for t in names], **style)
        axes[0, n].set(xscale="log", title=task, xlabel="learning rate")
        axes[1, n].set(xlabel="test, at the best rate")
        is_loss = cells[task, mixers[0]].is_loss
        axes[0, n].set_ylabel("loss, nats a byte" if is_loss else "right beyond chance")
        axes[1, n].set_ylabel("loss, nats a byte" if is_loss else "share right")
        for ax in axes[:, n]:
            ax.grid(alpha=0.3)
    axes[0, -1].legend(fontsize=7, bbox_to_anchor=(1.02, 1), loc="upper left")
    figure.savefig(path, dpi=80)
