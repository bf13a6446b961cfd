"""The picture of a loss curve, in a file and in a line of text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

BARS = "▁▂▃▄▅▆▇█"


def picture(path: str | Path, losses: Sequence[float] | Mapping[str, Sequence[float]], unit: str = "nats a token",
            mean: int = 20) -> None:  # fmt: skip
    """Draws losses by step, pale, and the mean of the last `mean` of them; several curves by name.

    Raises ModuleNotFoundError without matplotlib.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    curves = losses if isinstance(losses, Mapping) else {"": losses}
    for n, (name, values) in enumerate(curves.items()):
        x = np.asarray(values)
        steps, sums = np.arange(1, len(x) + 1), np.concatenate([[0], np.cumsum(x)])
        width = np.minimum(steps, mean)
        axes.plot(steps, x, color=f"C{n}", alpha=0.25, linewidth=0.8)
        axes.plot(steps, (sums[steps] - sums[steps - width]) / width, color=f"C{n}", label=name)
    axes.set(xlabel="step", ylabel=f"loss, {unit}")
    axes.grid(alpha=0.3)
    if any(curves):
        axes.legend()
    figure.savefig(path, dpi=100)


def in_a_line(losses: Sequence[float], width: int = 60) -> str:
    """Losses as bars of eight heights: means of up to `width` groups of steps, from the least to the largest.

    Raises ValueError for no losses.
    """
    if not len(losses):
        raise ValueError("in_a_line: losses is empty, expected one or more")
    means = np.array([x.mean() for x in np.array_split(np.asarray(losses, np.float64), min(width, len(losses)))])
    low, high = means.min(), means.max()
    heights = np.round((means - low) / (high - low or 1) * (len(BARS) - 1)).astype(int)
    return "".join(BARS[n] for n in heights.tolist())
