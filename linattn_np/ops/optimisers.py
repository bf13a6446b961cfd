"""Steps of optimisers on vectors and matrices of any array library, and as one loop for NumPy.

    m <- m + (1 - a) (g - m),   v <- v + (1 - b) (g^2 - v)
    p <- (1 - rate decay) p - rate m / (1 - a^t) / ((v / (1 - b^t))^{1/2} + eps)         AdamW, arXiv 1711.05101

Muon replaces the gradient of a matrix by the orthogonal matrix that is nearest to it, U V^T of G = U S V^T. Steps of
X <- a X + (b A + c A^2) X, A = X X^T, bring every singular value near 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..runtime.arrays import Array, Namespace, compat
from .host import numpy_kernels
from .rows import matrix_product

Group = tuple[int, int, float, float]  # first and last number, 1 - rate decay, rate

COEFFICIENTS: dict[str, tuple[tuple[float, float, float], ...]] = {
    "keller": ((3.4445, -4.7750, 2.0315),) * 5,  # Jordan et al., Muon
    "five": ((4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037),
             (2.8769, -3.1427, 1.2046), (2.8366, -3.0525, 1.2012)),
    "polar_express": ((8.1566, -22.4833, 15.8788), (4.0429, -2.8089, 0.5000), (3.8917, -2.7725, 0.5061),
                      (3.2858, -2.3681, 0.4645), (2.3465, -1.7098, 0.4232)),  # Amsel et al., arXiv 2505.16932
}  # fmt: skip


def adamw(xp: Namespace, p: Array, g: Array, m: Array, v: Array, groups: Sequence[Group], betas: tuple[float, float],
          eps: float, step: int, clip: float = 1.0) -> None:  # fmt: skip
    """One step of vectors (N,), in place; p, m, v change. step counts from 1, clip multiplies g."""
    a, b = 1 - betas[0], 1 - betas[1]
    first, second = 1 / (1 - betas[0] ** step), (1 - betas[1] ** step) ** -0.5
    if numpy_kernels(xp, p, g, m, v) is not None:
        from .cpu.optimisers import adamw as loops

        loops(p, g, m, v, groups, a=a, b=b, first=first, second=second, eps=eps, clip=clip)
        return
    x = clip * g
    m += a * (x - m)
    v += b * (x * x - v)
    for begin, end, keep, rate in groups:
        own = slice(begin, end)
        p[own] = keep * p[own] - rate * first * m[own] / (xp.sqrt(v[own]) * second + eps)


def norm(xp: Namespace, g: Array) -> float:
    """The root of the sum of squares of a vector."""
    if numpy_kernels(xp, g) is not None:
        from .cpu.optimisers import norm as loops

        return loops(g)
    return float(xp.sqrt(xp.sum(xp.astype(g, xp.float64) ** 2)))


def orthogonal(G: Array, name: str = "keller") -> Array:
    """U V^T of a matrix (D, M) by steps with a named set of coefficients."""
    xp = compat.array_namespace(G)
    tall = G.shape[0] > G.shape[1]
    X = xp.matrix_transpose(G) if tall else G
    X = X / (xp.sqrt(xp.sum(X * X)) * (1.01 if name == "polar_express" else 1.0) + 1e-7)
    for a, b, c in COEFFICIENTS[name]:
        A = matrix_product(xp, X, xp.matrix_transpose(X))
        X = a * X + matrix_product(xp, b * A + c * matrix_product(xp, A, A), X)
    return xp.matrix_transpose(X) if tall else X


def muon(p: Array, g: Array, m: Array, keep: float, rate: float, momentum: float, nesterov: bool,
           name: str = "keller") -> None:  # fmt: skip
    """A step of Muon on a matrix (D, M), in place; p and m change.

    m <- momentum m + (1 - momentum) g,   p <- keep p - rate max(1, M / D)^{1/2} U V^T of m, or of the next m
    """
    m += (1 - momentum) * (g - m)
    along: Any = g + momentum * (m - g) if nesterov else m
    p *= keep
    p -= rate * max(1.0, p.shape[1] / p.shape[0]) ** 0.5 * orthogonal(along, name)
