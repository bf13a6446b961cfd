"""Figures of a run: heat maps, signal and noise, norm of the state, learned gates, loss against retrieval."""

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .evaluation import TITLE_OF
from .report import gate_values
from .scores import Scores
from .text import CLASSES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {
    "linear": "#7f7f7f",
    "mlstm": "#c7c7c7",
    "mesa_net": "#8c564b",
    "retention": "#bcbd22",
    "softmax": "#000000",
    "write_gate": "#1f77b4",
    "mamba2": "#ff7f0e",
    "delta_one": "#98df8a",
    "delta": "#2ca02c",
    "gated_delta": "#d62728",
    "kda": "#9467bd",
}
STATE_LEVELS = (1, 2)  # repeated sentences and real prose: they differ in the growth of the state


def draw_all(folder: Path, scores: Scores) -> list[str]:
    """Write recall-*.png to the folder; their names."""
    import matplotlib

    matplotlib.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    for gates in scores.gate_sets:
        drawn.append(save(heat_maps(scores, gates), folder / f"recall-heat-{gates}.png"))
        drawn.append(save(signal_and_noise(scores, gates), folder / f"recall-votes-{gates}.png"))
        drawn.append(save(state_size(scores, gates), folder / f"recall-state-{gates}.png"))
    if scores.learned:
        drawn.append(save(learned_gates(scores), folder / "recall-gates.png"))
        drawn.append(save(loss_against_needles(scores), folder / "recall-loss.png"))
    return drawn


def save(figure: "Figure", path: Path) -> str:
    """Write one PNG at page resolution; its name."""
    import matplotlib.pyplot as plt

    figure.savefig(path, dpi=80)
    plt.close(figure)
    return path.name


def title_of(scores: Scores, memory: str) -> str:
    """The name of a memory, and whether gates were learned in it."""
    return f"{TITLE_OF[memory]} ({'gates learned' if memory in scores.learned else 'nothing learned'})"


def grid(rows: int, columns: int, width: float, height: float, **options: Any) -> tuple["Figure", np.ndarray]:
    """A figure and its axes (rows, columns); width and height of each axes in inches."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        rows, columns, figsize=(width * columns, height * rows), squeeze=False, layout="constrained", **options
    )
    return figure, axes


def heat_maps(scores: Scores, gates: str) -> "Figure":
    """Correct characters over depth and length: one column of panels per memory, one row per level."""
    memories = [*scores.memories(None), *scores.memories(gates)]
    figure, axes = grid(len(scores.levels), len(memories), 1.6, 2.0, sharex=True, sharey=True)
    for row, level in zip(axes, scores.levels, strict=True):
        for ax, memory in zip(row, memories, strict=True):
            columns = [scores.characters(gates, memory, level, length).mean(0) for length in scores.lengths]
            image = ax.imshow(np.array(columns).T, cmap="RdYlGn", vmin=0, vmax=1, aspect="auto")
            ax.set_xticks(range(len(scores.lengths)), [length_name(length) for length in scores.lengths])
        row[0].set_ylabel(f"level {level}\nneedle at depth, %")
    shown = np.unique(np.linspace(0, len(scores.depths) - 1, min(6, len(scores.depths))).astype(int))
    axes[0, 0].set_yticks(shown, [f"{100 * scores.depths[i]:.0f}" for i in shown])
    for ax, memory in zip(axes[0], memories, strict=True):
        words, _, learned = title_of(scores, memory).partition(" (")
        ax.set_title("\n".join([*textwrap.wrap(words, 15), f"({learned}"]), fontsize=8)
    figure.supxlabel("tokens")
    figure.colorbar(image, ax=axes, label="characters right", fraction=0.02)
    figure.suptitle(f"Needle in a haystack; learned gates are those from {gates}")
    return figure


def length_name(length: int) -> str:
    """512, 1k, 2k."""
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)


def signal_and_noise(scores: Scores, gates: str) -> "Figure":
    """The needle's vote and the spread of all other votes against T: interference and decay."""
    levels = [level for level in STATE_LEVELS if level in scores.levels] or scores.levels
    figure, axes = grid(2, len(levels), 4.6, 3.2, sharex=True, sharey="row")
    for column, level in enumerate(levels):
        for part, name in enumerate(("needle's own vote", "spread of all other votes")):
            ax = axes[part, column]
            for memory, points in votes_by_memory(scores, gates, level):
                shown = np.where(points[:, part] > 1e-5, points[:, part], np.nan)  # 0 cannot be drawn on a log axis
                ax.plot(scores.lengths, shown, label=title_of(scores, memory), **style(memory))
            log_axes(ax, scores.lengths)
            ax.set_title(f"level {level}: {name}")
            ax.set_xlabel("tokens")
    name_lines(figure, axes[0, 0])
    figure.suptitle(f"How an answer is lost; learned gates are those from {gates}")
    return figure


def state_size(scores: Scores, gates: str) -> "Figure":
    """Norm of the state against T."""
    levels = [level for level in STATE_LEVELS if level in scores.levels] or scores.levels
    figure, axes = grid(1, len(levels), 4.6, 3.2, sharey=True)
    for ax, level in zip(axes[0], levels, strict=True):
        for memory, points in votes_by_memory(scores, gates, level):
            ax.plot(scores.lengths, points[:, 2], label=title_of(scores, memory), **style(memory))
        log_axes(ax, scores.lengths)
        ax.set(title=f"level {level}: size of the state", xlabel="tokens")
    name_lines(figure, axes[0, 0])
    figure.suptitle(f"Learned gates are those from {gates}")
    return figure


def votes_by_memory(scores: Scores, gates: str, level: int) -> list[tuple[str, np.ndarray]]:
    """Each memory with its signal, noise and norm of the state, (lengths, 3)."""
    curves = []
    for memory in [*scores.memories(None), *scores.memories(gates)]:
        points = [scores.votes(gates, memory, level, length) for length in scores.lengths]
        if None not in points:
            curves.append((memory, np.array(points)))
    return curves


def log_axes(ax: "Axes", lengths: list[int]) -> None:
    """Make both axes logarithmic, with ticks at the lengths."""
    ax.set(xscale="log", yscale="log")
    ax.set_xticks(lengths, [length_name(length) for length in lengths])
    ax.minorticks_off()
    ax.grid(alpha=0.3)


def learned_gates(scores: Scores) -> "Figure":
    """Write strength and time constant of the decay, 1 / (1 - decay) tokens, by class; one column per gate set."""
    sets = list(scores.gate_sets)
    figure, axes = grid(2, len(sets), 4.6, 2.8, sharey="row")
    for column, gates in enumerate(sets):
        values = {memory: gate_values(scores, gates, memory) for memory in scores.memories(gates)}
        bars(axes[0, column], {m: by["write"] for m, by in values.items() if "write" in by})
        bars(axes[1, column], {m: 1 / (1 - by["decay"]) for m, by in values.items() if "decay" in by})
        axes[0, column].set_title(f"{gates}: write strength")
        axes[1, column].set(title=f"{gates}: span of the decay, tokens", yscale="log")
    axes[0, 0].legend(fontsize=7, ncols=2)
    return figure


def bars(ax: "Axes", values: dict[str, np.ndarray]) -> None:
    """A group of bars per memory, a bar per class."""
    places = np.arange(len(values))
    for i, name in enumerate(CLASSES):
        heights = [by_class[i] for by_class in values.values()]
        ax.bar(places + (i - 2) * 0.16, heights, 0.16, label=name, color=f"C{i}")
    titles = [TITLE_OF[memory] for memory in values]
    ax.set_xticks(places, titles, rotation=20, ha="right", fontsize=8)


def loss_against_needles(scores: Scores) -> "Figure":
    """Held-out loss against exact answers, the trade-off of decay; one panel per gate set."""
    sets = list(scores.gate_sets)
    figure, axes = grid(1, len(sets), 3.6, 3.2, sharey=True)
    for ax, gates in zip(axes[0], sets, strict=True):
        for memory in scores.memories(gates):
            right = [scores.exact(gates, memory, level, T).mean() for level in scores.levels for T in scores.lengths]
            loss, marker = scores.losses(gates, memory).mean(), style(memory, line=False)
            ax.plot(loss, np.mean(right), label=TITLE_OF[memory], **marker)
        ax.set(title=f"gates from {gates}", xlabel="held-out loss, nats per token")
        ax.margins(0.15)
        ax.grid(alpha=0.3)
    axes[0, 0].set_ylabel("whole answers right, mean of all cells")
    name_lines(figure, axes[0, 0])
    return figure


def name_lines(figure: "Figure", ax: "Axes") -> None:
    """Add a legend beside the axes."""
    handles, labels = ax.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside right center", fontsize=8)


def style(memory: str, line: bool = True) -> dict[str, Any]:
    """Colour and marker of a memory; KDA has hollow rings, so that points under them remain visible."""
    hollow: dict[str, Any] = {"markerfacecolor": "none", "markersize": 10} if memory == "kda" else {}
    return {"color": COLOURS.get(memory), "marker": "o", "linestyle": "-" if line else "", **hollow}
