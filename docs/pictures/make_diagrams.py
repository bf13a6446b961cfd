"""Draw the block diagrams: python docs/pictures/make_diagrams.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
INK, FILL, QUIET = "#26355d", "#dfe6f5", "#9aa3b5"


def mask(axes: Any) -> None:
    """The causal matrix in blocks of C tokens: what is computed as products of pairs, and what goes through states."""
    n = 4
    for i in range(n):
        for j in range(n):
            kind = "within" if i == j else "before" if j < i else "after"
            color = {"within": "#f5c77e", "before": FILL, "after": "white"}[kind]
            axes.add_patch(axes.rectangle((j, n - 1 - i), 1, 1, facecolor=color, edgecolor=QUIET))
            if kind == "within":
                axes.add_patch(axes.polygon([(j, n - i), (j + 1, n - i), (j + 1, n - 1 - i)], facecolor="white"))
    axes.text(0.5, 2.35, "through\nthe state", ha="center", va="center", color=INK, fontsize=9)
    axes.text(0.3, 3.2, "pairs", ha="center", color=INK, fontsize=9)
    axes.text(2.9, 3.3, "0: later tokens", ha="center", color=QUIET, fontsize=9)
    axes.set(xlim=(-0.1, n + 0.1), ylim=(-0.1, n + 0.1), aspect="equal", xticks=[i + 0.5 for i in range(n)],
             yticks=[n - 0.5 - i for i in range(n)], xlabel="chunk of keys j", ylabel="chunk of queries i")
    axes.set_xticklabels(range(1, n + 1))
    axes.set_yticklabels(range(1, n + 1))


def chunks(axes: Any) -> None:
    """Intra- and inter-chunk computation of three chunks."""
    def box(x: float, y: float, text: str, color: str) -> None:
        axes.add_patch(axes.rectangle((x, y), 1.6, 0.7, facecolor=color, edgecolor=INK))
        axes.text(x + 0.8, y + 0.35, text, ha="center", va="center", fontsize=9, color=INK)

    def arrow(a: tuple[float, float], b: tuple[float, float]) -> None:
        axes.annotate("", b, a, arrowprops={"arrowstyle": "->", "color": INK})

    def state(x: float, n: int) -> None:
        axes.plot([x], [0.9], "o", color=INK)
        axes.text(x, 1.12, f"$S_{n}$", fontsize=11, color=INK, ha="center")

    for n in range(3):
        x = 2.6 * n
        box(x, 2.2, f"chunk {n + 1}\n$+\\;P V$: pairs", "#f5c77e")
        box(x, 1.1, f"read $Q S_{n}$", FILL)
        box(x, 0.0, "write $K^T V$", FILL)
        arrow((x - 0.8, 0.9), (x, 0.5))
        arrow((x - 0.8, 0.9), (x, 1.4))
        arrow((x + 1.6, 0.45), (x + 1.85, 0.8))
        state(x - 0.8, n)
        arrow((x + 0.8, 1.8), (x + 0.8, 2.2))
        arrow((x + 0.8, 2.9), (x + 0.8, 3.4))
        axes.text(x + 0.95, 3.15, "$O$", fontsize=10, color=INK)
    state(7.0, 3)
    axes.set(xlim=(-1, 7.8), ylim=(-0.2, 3.6), xticks=[], yticks=[])
    for side in axes.spines.values():
        side.set_visible(False)


def main() -> None:
    """Write the picture."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Polygon, Rectangle

    figure, both = plt.subplots(1, 2, figsize=(9.5, 3.6), width_ratios=(1, 1.9), layout="constrained")
    for axes in both:
        axes.rectangle, axes.polygon = Rectangle, Polygon
    mask(both[0])
    chunks(both[1])
    figure.savefig(HERE / "chunks.png", dpi=110)


if __name__ == "__main__":
    main()
