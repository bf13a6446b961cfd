"""The result of a probe: tables, sentences derived from them, curves."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import linattn_np as la

from ..tables import TextTable, markdown_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Table(NamedTuple):
    """Rows of numbers and text, with column names."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]


class Curve(NamedTuple):
    """One line of a panel."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    style: str = "o-"


@dataclass
class Panel:
    """Curves on one pair of axes."""

    title: str
    x: str
    y: str
    curves: list[Curve]
    log: str = "xy"
    ticks: tuple[str, ...] = ()  # tick labels at x = 0, 1, ..., instead of numbers


@dataclass
class ProbeResult:
    """The result of one probe.

    `known` says who can do it, `meaning` what follows from that and what does not; `sentences` are about the tables.
    """

    name: str
    question: str
    tables: list[Table]
    sentences: list[str]
    panels: list[Panel] = field(default_factory=list)
    known: str = ""
    meaning: str = ""

    @property
    def summary(self) -> list[str]:
        """Three sentences: the question, who can do it, what that means and what not."""
        return [f"Asked: {self.question}", f"Known: {self.known}", f"Means: {self.meaning}"]


def cell(x: Any) -> str:
    """The text of a value; floats with three digits."""
    if isinstance(x, bool) or not isinstance(x, float | np.floating):
        return str(x)
    y = float(x)
    if np.isnan(y):
        return "-"
    return "0" if y == 0 else f"{y:.3g}" if 1e-3 <= abs(y) < 1e4 else f"{y:.1e}"


def listed(names: list[str]) -> str:
    """Names of memories in a sentence: delta_rule (beta 1), mesa_net; "none" for none."""
    return ", ".join(name.replace(", ", " (", 1) + ")" * (", " in name) for name in names) or "none"


def markdown(result: ProbeResult) -> str:
    """The summary, tables and sentences as Markdown."""
    tables = [markdown_table(text_table(table)) for table in result.tables]
    summary = [line for sentence in result.summary for line in (sentence, "")]
    return "\n".join([f"## {result.name}", "", *summary, *tables, *result.sentences, ""])


def text_table(table: Table) -> TextTable:
    """The table with its cells as text."""
    rows = [[cell(x) for x in row] for row in table.rows]
    return TextTable(table.title, table.columns, rows, left=len(table.columns))


def write_json(path: Path, results: list[ProbeResult], seconds: float) -> None:
    """Write all results as JSON, with versions and machine: a probe a line."""
    plain = lambda x: None if x != x else x.item() if isinstance(x, np.generic) else x  # noqa: E731  (nan: no value)
    about = {
        "date": datetime.now(UTC).date().isoformat(), "linattn_np": la.__version__, "numpy": np.__version__,
        "python": platform.python_version(), "machine": platform.machine(), "seconds": round(seconds, 1),
    }  # fmt: skip
    probes = {f.name: {"summary": f.summary, "sentences": f.sentences,
                       "tables": [{"title": t.title, "columns": list(t.columns),
                                   "rows": [[plain(x) for x in row] for row in t.rows]} for t in f.tables]}
              for f in results}  # fmt: skip
    lines = ",\n  ".join(f"{json.dumps(name)}: {json.dumps(probe)}" for name, probe in probes.items())
    path.write_text(f'{{\n {json.dumps(about)[1:-1]},\n "probes": {{\n  {lines}\n }}\n}}\n', "utf8")


def draw(folder: Path, result: ProbeResult) -> str:
    """Write probe-NAME.png, its panels side by side; its name."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    count = len(result.panels)
    figure, axes = plt.subplots(1, count, figsize=(4.8 * count, 3.6), squeeze=False, layout="constrained")
    for ax, panel in zip(axes[0], result.panels, strict=True):
        _draw_panel(ax, panel)
    path = folder / f"probe-{result.name}.png"
    figure.savefig(path, dpi=80)
    plt.close(figure)
    return path.name


def _draw_panel(ax: Axes, panel: Panel) -> None:
    for curve in panel.curves:
        ax.plot(curve.x, curve.y, curve.style, label=curve.label, markersize=3, linewidth=1.2)
    if "x" in panel.log:
        ax.set_xscale("log")
    if "y" in panel.log:
        ax.set_yscale("log")
    ax.set(title=panel.title, xlabel=panel.x, ylabel=panel.y)
    if panel.ticks:
        ax.set_xticks(range(len(panel.ticks)), panel.ticks, rotation=25, ha="right", fontsize=7)
    ax.grid(alpha=0.3)
    ax.legend(fontsize=7)
