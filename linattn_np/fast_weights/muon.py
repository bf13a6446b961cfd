"""Newton-Schulz iterations towards the nearest orthogonal matrix, and their transpose.

    X_0 = G / (|G| + e)          rows no more than columns: else the transpose is taken
    X <- a X + (b A + c A A) X,  A = X X^T

Transpose of a step, with B = b A + c A A and Y the cotangent of the new X:

    dB = Y X^T,   D = dB + dB^T,   dX = a Y + B Y + (b D + c (D A + A D)) X
"""

from __future__ import annotations

from typing import Any

from ..runtime.arrays import Array, Namespace

E = 1e-7
KELLER = ((3.4445, -4.7750, 2.0315),) * 5  # Jordan, Muon
LACT = ((4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037), (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012))  # fmt: skip
POLAR_EXPRESS = ((8.1566, -22.4833, 15.8788), (4.0429, -2.8089, 0.5000), (3.8917, -2.7725, 0.5061),
                 (3.2858, -2.3681, 0.4645), (2.3465, -1.7098, 0.4232))  # fmt: skip
COEFFICIENTS = {"keller": KELLER, "lact": LACT, "polar_express": POLAR_EXPRESS}
MARGIN = {"polar_express": 1.01}  # of |G|


def _turned(xp: Namespace, x: Array) -> Array:
    return xp.matrix_transpose(x)


def _start(xp: Namespace, G: Array, name: Any) -> tuple[Array, Array, float]:
    """(X_0, |G|, margin)."""
    margin = MARGIN.get(name, 1.0) if isinstance(name, str) else 1.0
    n = xp.sqrt(xp.sum(G * G, axis=(-2, -1), keepdims=True))
    return G / (margin * n + E), n, margin


def newton_schulz_kept(xp: Namespace, G: Array, name: Any) -> tuple[Array, Any]:
    """(the last X (..., n, m) for G (..., n, m), what the transpose reads)."""
    tall = G.shape[-2] > G.shape[-1]
    G = _turned(xp, G) if tall else G
    X, n, margin = _start(xp, G, name)
    every = []
    for a, b, c in COEFFICIENTS[name] if isinstance(name, str) else name:
        A = xp.matmul(X, _turned(xp, X))
        B = b * A + c * xp.matmul(A, A)
        every.append((X, A, B))
        X = a * X + xp.matmul(B, X)
    return (_turned(xp, X) if tall else X), (G, n, margin, every)


def newton_schulz(xp: Namespace, G: Array, name: Any) -> Array:
    """The last X."""
    return newton_schulz_kept(xp, G, name)[0]


def newton_schulz_vjp(xp: Namespace, G: Array, name: Any, dX: Array, kept: Any = None) -> Array:
    """dG; where G is 0, X is linear in it: dX / e. A and B are symmetric, so that dA + dA^T = b D + c (D A + A D)."""
    tall = G.shape[-2] > G.shape[-1]
    G, n, margin, every = newton_schulz_kept(xp, G, name)[1] if kept is None else kept
    Y, table = _turned(xp, dX) if tall else dX, COEFFICIENTS[name] if isinstance(name, str) else name
    for (X, A, B), (a, b, c) in zip(reversed(every), reversed(table), strict=True):
        dB = xp.matmul(Y, _turned(xp, X))
        D = dB + _turned(xp, dB)
        DA = xp.matmul(D, A)
        Y = a * Y + xp.matmul(B, Y) + xp.matmul(b * D + c * (DA + _turned(xp, DA)), X)
    along = xp.sum(G * Y, axis=(-2, -1), keepdims=True)
    size = margin * n + E
    safe = xp.where(n > 0, n, xp.ones_like(n))
    d = Y / size - G * (margin * along / (safe * size * size))
    return _turned(xp, d) if tall else d
