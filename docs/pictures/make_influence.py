"""Draw the attention matrix of every variant on the same tokens: python docs/pictures/make_influence.py."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import linattn_np as la

PICTURE = Path(__file__).resolve().parent / "attention-matrices.png"
T, K, V = 32, 8, 4
KEYS = ("k", "B", "p", "a", "b")


def arrays(fn: object) -> dict[str, np.ndarray]:
    """One head: tokens 20 to 23 repeat tokens 8 to 11, the decay is strong at token 16, strengths are 1."""
    spec = fn.spec
    x = la.testing.sample(fn, np.random.default_rng(3), B=(), T=T, H=1, K=K, V=V)
    for name, y in x.items():
        on_tokens = spec.arrays[name].axes.split("|")[0].split()[0] == "T"
        if on_tokens and name in (spec.change.query, *KEYS):
            y[20:24] = y[8:12]
        if fn.samples.distribution(name) == "log decay":
            y *= 0.25
            if on_tokens:
                y[16] = -4.0
        if fn.samples.distribution(name) == "strength":
            y[...] = 1.0
    return {n: y for n, y in x.items() if n not in ("gv", "z", "D") or fn is la.dfw}


def matrix(fn: object) -> np.ndarray:
    """(T, T n) of the one head; of the first value channel where there is a matrix per channel."""
    A = la.influence_matrix(fn, **arrays(fn))[0]
    return A if A.ndim == 2 else A[0]


def main() -> None:
    """Write the picture."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns = 6
    rows = -(-len(la.VARIANTS) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(1.9 * columns, 2.05 * rows), layout="constrained")
    for ax in axes.flat:
        ax.axis("off")
    for ax, fn in zip(axes.flat, la.VARIANTS, strict=False):
        A = matrix(fn)
        size = np.quantile(np.abs(A[np.tri(*A.shape) > 0]), 0.98)
        ax.imshow(A, cmap="RdBu_r", vmin=-size, vmax=size, aspect="auto", interpolation="nearest")
        ax.set_title(fn.__name__, fontsize=9)
    figure.savefig(PICTURE, dpi=80)


if __name__ == "__main__":
    main()
