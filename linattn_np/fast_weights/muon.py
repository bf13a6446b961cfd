"""Newton-Schulz iterations towards the nearest orthogonal matrix, and their transpose.

    X_0 = G / (|G| + e)          rows no more than columns: else the transpose is taken
    X <- a X + (b A + c A A) X,  A = X X^T

Transpose of a step, with B = b A + c A A and Y the cotangent of the new X:

    dB = Y X^T,   D = dB + dB^T,   dX = a Y + B Y + (b D + c (D A + A D)) X
"""

from __future__ import annotations

from typing import Any

from ..ops.host import numpy_kernels
from ..runtime.arrays import Array, Namespace
from .fused import combined, matmul

E = 1e-7
KELLER = ((3.4445, -4.7750, 2.0315),) * 5  # Jordan, Muon
LACT = ((4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037), (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012))  # fmt: skip
POLAR_EXPRESS = ((8.1566, -22.4833, 15.8788), (4.0429, -2.8089, 0.5000), (3.8917, -2.7725, 0.5061),
                 (3.2858, -2.3681, 0.4645), (2.3465, -1.7098, 0.4232))  # fmt: skip
COEFFICIENTS = {"keller": KELLER, "lact": LACT, "polar_express": POLAR_EXPRESS}
MARGIN = {"polar_express": 1.01}  # of |G|
NO_FACTORS = (None, None, None)
LARGEST = 2**17  # numbers of a matrix in compiled loops: threads share out matrices, and BLAS the rows of a large one


def _numbers(name: Any) -> tuple[Any, float]:
    """((a, b, c) of each iteration, margin)."""
    return (COEFFICIENTS[name], MARGIN.get(name, 1.0)) if isinstance(name, str) else (name, 1.0)


def _kernel(xp: Namespace, name: Any, G: Array, *more: Array) -> Any:
    """The compiled loops of NumPy arrays, or None."""
    fits = 0 < G.shape[-2] * G.shape[-1] <= LARGEST and G.size and str(G.dtype) in ("float32", "float64")
    if not fits or not len(_numbers(name)[0]) or numpy_kernels(xp, G, *more) is None:
        return None
    from .cpu.muon import newton_schulz as kernel

    return kernel


def newton_schulz_fwd(xp: Namespace, G: Array, name: Any, keep: bool = True) -> tuple[Array, Any]:
    """(the last X (..., n, m) for G (..., n, m), what the transpose reads; None: G alone)."""
    table, margin = _numbers(name)
    if (kernel := _kernel(xp, name, G)) is not None:
        return kernel(G, table, margin, E, keep=keep)
    return _by_arrays(xp, G, table, margin, keep)


def _by_arrays(xp: Namespace, G: Array, table: Any, margin: float, keep: bool = True) -> tuple[Array, Any]:
    tall = G.shape[-2] > G.shape[-1]
    G = xp.matrix_transpose(G) if tall else G
    n = xp.sqrt(xp.sum(G * G, axis=(-2, -1), keepdims=True))
    X, every = G / (margin * n + E), []
    for a, b, c in table:
        A = matmul(xp, X, xp.matrix_transpose(X))
        B = combined(xp, (A, matmul(xp, A, A)), NO_FACTORS, b, c)
        every += [(X, A, B)] if keep else []
        X = combined(xp, (X, matmul(xp, B, X)), NO_FACTORS, a)
    return (xp.matrix_transpose(X) if tall else X), (G, n, every) if keep else None


def newton_schulz(xp: Namespace, G: Array, name: Any) -> Array:
    """The last X."""
    return newton_schulz_fwd(xp, G, name, keep=False)[0]


def newton_schulz_vjp(xp: Namespace, G: Array, name: Any, dX: Array, residuals: Any = None) -> Array:
    """dG; where G is 0, X is linear in it: dX / e. A and B are symmetric, so that dA + dA^T = b D + c (D A + A D)."""
    (table, margin), tall = _numbers(name), G.shape[-2] > G.shape[-1]
    if (kernel := _kernel(xp, name, G, dX)) is not None:
        return kernel(G, table, margin, E, dX, residuals)[0]
    G, n, every = _by_arrays(xp, G, table, margin)[1] if residuals is None else residuals
    Y = xp.matrix_transpose(dX) if tall else dX
    for (X, A, B), (a, b, c) in zip(reversed(every), reversed(table), strict=True):
        dB = matmul(xp, Y, xp.matrix_transpose(X))
        D = dB + xp.matrix_transpose(dB)
        DA = matmul(xp, D, A)
        DA = combined(xp, (D, DA + xp.matrix_transpose(DA)), NO_FACTORS, b, c)
        Y = combined(xp, (Y, matmul(xp, B, Y), matmul(xp, DA, X)), NO_FACTORS, a)
    along = xp.sum(G * Y, axis=(-2, -1), keepdims=True)
    size = margin * n + E
    safe = xp.where(n > 0, n, xp.ones_like(n))
    d = Y / size - G * (margin * along / (safe * size * size))
    return xp.matrix_transpose(d) if tall else d
