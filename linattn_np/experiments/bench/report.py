"""Three sentences, one table, one picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from .measure import Row, crossover


def sentences(rows: list[Row], softmax: Row, name: str, threads: str) -> list[str]:
    """What was measured, in words: exactness, speed, memory."""
    T = max(softmax.seconds)
    worst = max(rows, key=lambda row: np.nan_to_num(row.error))
    fastest = min(rows, key=lambda row: row.seconds[T])
    leanest = min(rows, key=lambda row: row.peak)
    times = softmax.seconds[T] / fastest.seconds[T]
    at, outside = crossover(fastest, softmax)
    start = (f"from T = {at:,.0f} on, the shortest measured, or earlier" if outside and at == min(softmax.seconds) else
             "at no length that was measured" if np.isinf(at) else
             f"from about T = {at:,.0f} on" + outside * " (extrapolated)")  # fmt: skip
    exactness = (
        f"All forms of a function gave the same numbers on {name}: the largest difference from float64 was "
        f"{worst.error:.3g} eps of float32 ({worst.name})."
        if np.isfinite(worst.error) else "The lengths were too long for a comparison with float64."
    )  # fmt: skip
    speed = (
        f"On {threads}, at T = {T:,}, the fastest was {fastest.name}: {milliseconds(fastest.seconds[T])} ms where "
        f"softmax attention in NumPy took {milliseconds(softmax.seconds[T])} ms, "
        f"{digits(max(times, 1 / times))} times as {'fast' if times >= 1 else 'slow'}; it is faster {start}."
    )  # fmt: skip
    memory = (
        f"It held {mib(fastest.peak)} MiB of arrays beside its inputs, softmax attention {mib(softmax.peak)} MiB "
        f"(in blocks of rows) and the leanest, {leanest.name}, {mib(leanest.peak)} MiB; what a sequence "
        "leaves behind is a state of fixed size, where softmax attention keeps all keys and values."
    )
    return [exactness, speed, memory]


def digits(x: float) -> str:
    """Three digits or more, without an exponent."""
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


def milliseconds(seconds: float) -> str:
    """Seconds as milliseconds."""
    return digits(1e3 * seconds)


def mib(size: float) -> str:
    """Bytes as MiB."""
    return digits(size / 2**20)


def table(rows: list[Row], softmax: Row) -> tuple[list[str], list[list[str]]]:
    """(names of the columns, rows of text)."""
    lengths = sorted(softmax.seconds)
    columns = ["function", "form", "error, eps", *(f"ms, T={T}" for T in lengths), f"predicted, T={lengths[-1]}",
               "MiB", "faster than softmax from T ="]  # fmt: skip
    cells = []
    for row in [*rows, softmax]:
        at, outside = crossover(row, softmax)
        start = (
            ""
            if row is softmax
            else "not seen"
            if np.isinf(at)
            else (f"<= {at:,.0f}" if outside and at == lengths[0] else f"{at:,.0f}" + outside * " (extrapolated)")
        )
        cells.append([row.function, row.form, "-" if np.isnan(row.error) else f"{row.error:.3g}",
                      *(milliseconds(row.seconds[T]) for T in lengths), milliseconds(row.predicted[lengths[-1]]),
                      mib(row.peak), start])  # fmt: skip
    return columns, cells


def draw(path: Path, rows: list[Row], softmax: Row, title: str) -> None:
    """Time against the number of tokens."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(row.function for row in rows))
    styles = {"recurrent": ":", "chunks": "-", "parallel": "--"}
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    lengths = sorted(softmax.seconds)
    for row in rows:
        axes.loglog(
            lengths,
            [1e3 * row.seconds[T] for T in lengths],
            styles[row.form],
            marker="o",
            markersize=3,
            color=f"C{names.index(row.function) % 10}",
            label=row.name,
        )
    times = [1e3 * softmax.seconds[T] for T in lengths]
    axes.loglog(lengths, times, "k-", marker="s", markersize=4, label=softmax.name)
    axes.set(xlabel="tokens", ylabel="milliseconds", title=title)
    axes.set_xticks(lengths, [f"{T:,}" for T in lengths])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(handlelength=3.5, fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=110)
    plt.close(figure)


def document(rows: list[Row], softmax: Row, **about: Any) -> dict[str, Any]:
    """Everything as JSON."""
    every = [
        {
            "function": row.function,
            "form": row.form,
            "error_eps": None if np.isnan(row.error) else row.error,
            "seconds": row.seconds,
            "predicted": row.predicted,
            "peak_bytes": row.peak,
        }
        for row in [*rows, softmax]
    ]
    return {**about, "rows": every}
