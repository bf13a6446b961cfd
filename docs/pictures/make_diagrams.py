"""Draw the block diagrams: python docs/pictures/make_diagrams.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
INK, PAIRS, STATE, QUIET = "#26355d", "#f5c77e", "#dfe6f5", "#6b7487"


def mask(axes: Any) -> None:
    """The causal matrix in blocks of C tokens: what is computed as products of pairs, and what goes through states."""
    from matplotlib.patches import Polygon, Rectangle

    n = 4
    for i in range(n):
        for j in range(n):
            color = PAIRS if i == j else STATE if j < i else "white"
            axes.add_patch(Rectangle((j, n - 1 - i), 1, 1, facecolor=color, edgecolor=QUIET))
            if i == j:
                axes.add_patch(Polygon([(j, n - i), (j + 1, n - i), (j + 1, n - 1 - i)], facecolor="white"))
    axes.text(1.0, 1.0, "earlier chunks:\nthrough the state", ha="center", va="center", color=INK, fontsize=13)
    axes.text(0.32, 3.15, "pairs", ha="center", color=INK, fontsize=12)
    axes.text(2.9, 3.3, "later tokens: 0", ha="center", color=QUIET, fontsize=13)
    axes.set(
        xlim=(-0.05, n + 0.05),
        ylim=(-0.05, n + 0.05),
        aspect="equal",
        xticks=[i + 0.5 for i in range(n)],
        yticks=[n - 0.5 - i for i in range(n)],
    )
    axes.set_xlabel("chunk of keys j", fontsize=13)
    axes.set_ylabel("chunk of queries i", fontsize=13)
    axes.set_xticklabels(range(1, n + 1), fontsize=13)
    axes.set_yticklabels(range(1, n + 1), fontsize=13)


def box(axes: Any, y: float, text: str, color: str) -> None:
    """One step of a chunk."""
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((0.9, y), 2.4, 0.56, facecolor=color, edgecolor=INK))
    axes.text(2.1, y + 0.27, text, ha="center", va="center", fontsize=13, color=INK)


def chunks(axes: Any) -> None:
    """Two chunks from top to bottom: each reads the state before it, adds its pairs, and writes the state after it."""

    def arrow(a: tuple[float, float], b: tuple[float, float]) -> None:
        axes.annotate("", b, a, arrowprops={"arrowstyle": "-|>", "color": INK, "linewidth": 1.4})

    def state(y: float, n: int) -> None:
        axes.text(0.2, y, f"$S_{n}$", fontsize=17, color=INK, ha="center", va="center")

    for n in range(2):
        y = 3.0 * (1 - n)
        axes.text(0.9, y + 2.86, f"chunk {n + 1}", fontsize=13, color=INK, va="center", weight="bold")
        box(axes, y + 2.0, f"read the state: $Q\\,S_{n}$", STATE)
        box(axes, y + 1.2, "add the pairs: $+\\,P\\,V$", PAIRS)
        box(axes, y + 0.4, "write: $+\\,K^T V$", STATE)
        state(y + 2.65, n)
        arrow((0.38, y + 2.55), (0.88, y + 2.3))  # the state is read
        arrow((0.2, y + 2.35), (0.2, y + 0.0))  # and carried over
        arrow((0.88, y + 0.68), (0.26, y + 0.3))  # with what the chunk writes
        arrow((2.1, y + 1.98), (2.1, y + 1.78))
        arrow((3.32, y + 1.48), (3.75, y + 1.48))
        axes.text(3.8, y + 1.48, f"$O_{n + 1}$", fontsize=15, color=INK, va="center")
    state(-0.3, 2)
    axes.set(xlim=(-0.1, 4.3), ylim=(-0.6, 6.1), xticks=[], yticks=[])
    for side in axes.spines.values():
        side.set_visible(False)


def main() -> None:
    """Write the pictures: narrow enough for a telephone, where their text stays readable."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    for name, draw, size in (("mask", mask, (4.4, 4.4)), ("chunks", chunks, (4.4, 5.2))):
        figure, axes = plt.subplots(figsize=size, layout="constrained")
        draw(axes)
        figure.savefig(HERE / f"{name}.png", dpi=100)
        plt.close(figure)


if __name__ == "__main__":
    main()
