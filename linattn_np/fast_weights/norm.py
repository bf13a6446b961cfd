"""The layer norm of a prediction, its transpose, and the transpose of that: what a gradient through a gradient needs.

x^ = (z - mean z) / s,   s = sqrt(var z + eps),   LN(z) = gamma x^ + beta
P(a) = (a - mean a - x^ mean(a x^)) / s                    the transpose of z -> x^
dz = P(gamma e)
"""

from __future__ import annotations

from typing import Any

from ..runtime.arrays import Array, Namespace
from .fused import fused_of


def _mean(xp: Namespace, x: Array) -> Array:
    return xp.sum(x, axis=-1, keepdims=True) / max(x.shape[-1], 1)


def _standard(xp: Namespace, z: Array, eps: float) -> tuple[Array, Array]:
    """(x^, s)."""
    z = z - _mean(xp, z)
    s = xp.sqrt(_mean(xp, z * z) + eps)
    return z / s, s


def _project(xp: Namespace, a: Array, x: Array, s: Array) -> Array:
    """P(a)."""
    return (a - _mean(xp, a) - x * _mean(xp, a * x)) / s


def norm(xp: Namespace, x: Array, z: Array, gamma: Array, beta: Array, eps: float) -> Array:
    """x + gamma x^ + beta."""
    if (fused := _fused(xp, z, gamma, x)) is not None:
        return fused.rows("norm", 1, (z, x), gamma, beta, eps)[0]
    return x + (gamma * _standard(xp, z, eps)[0] + beta)


def _fused(xp: Namespace, z: Array, gamma: Array, *more: Array) -> Any:
    """The kernels for these rows and their norm's weights."""
    rows = all(y.shape == z.shape for y in more) and gamma.ndim == 3
    return fused_of(xp, z, gamma, *more) if rows else None


def norm_vjp(xp: Namespace, z: Array, gamma: Array, e: Array, eps: float) -> tuple[Array, Array]:
    """(dz, dgamma of each row); dbeta is e."""
    if (fused := _fused(xp, z, gamma, e)) is not None:
        return fused.rows("norm_vjp", 2, (z, e), gamma, None, eps)
    x, s = _standard(xp, z, eps)
    return _project(xp, gamma * e, x, s), x * e


def norm_vjp_vjp(xp: Namespace, z: Array, gamma: Array, e: Array, c: Array, eps: float) -> tuple[Array, Array, Array]:
    """(dz, dgamma of each row, de) of <c, P(gamma e)>.

    P is symmetric, so that the gradient of a = gamma e is P(c). Through x^ and s, with y = P(a):
    dz = -(y mean(c x^) + P(c) mean(a x^) + x^ mean(a P(c))) / s.
    """
    if (fused := _fused(xp, z, gamma, e, c)) is not None:
        return fused.rows("norm_vjps", 3, (z, e, c), gamma, None, eps)
    x, s = _standard(xp, z, eps)
    a = gamma * e
    y, p = _project(xp, a, x, s), _project(xp, c, x, s)
    dz = -(y * _mean(xp, c * x) + p * _mean(xp, a * x) + x * _mean(xp, a * p)) / s
    return dz, e * p, gamma * p
