"""The factors of a recurrence: numbers, or matrices of neighbouring channels.

Numbers a (..., D) act on h (..., D) one by one. Matrices (..., D / N, N, N) act on each N neighbouring channels; * is
the conjugate transpose.
"""

from __future__ import annotations

from ..ops.associative import Items, affine
from ..runtime.arrays import Array, Namespace, conjugate, device
from .types import Inputs


def factors(xp: Namespace, x: Inputs) -> Array:
    """a_t, e^{g_t} or A_t."""
    return x.gate if x.g is None else xp.exp(x.g)


def act(xp: Namespace, x: Inputs, a: Array, h: Array) -> Array:
    """a h"""
    return a * h if x.A is None else _flat(xp, a @ _columns(xp, x, h))


def adjoint(xp: Namespace, x: Inputs, a: Array) -> Array:
    """a*"""
    return conjugate(xp, a if x.A is None else xp.matrix_transpose(a))


def unit(xp: Namespace, x: Inputs, a: Array) -> Array:
    """The factors that leave h as it is, in the shape of a."""
    if x.A is None:
        return xp.ones_like(a)
    return xp.broadcast_to(xp.eye(x.block, dtype=a.dtype, device=device(a)), a.shape)


def outer(xp: Namespace, x: Inputs, p: Array, h: Array) -> Array:
    """p h*: the gradient of a from that of a h."""
    h = conjugate(xp, h)
    return p * h if x.A is None else _columns(xp, x, p) * xp.matrix_transpose(_columns(xp, x, h))


def composed(xp: Namespace, x: Inputs, first: Items, second: Items) -> Items:
    """Of h -> a h + x: the first map, then the second."""
    if x.A is None:
        return affine(first, second)
    (a, y), (b, z) = first, second
    return b @ a, act(xp, x, b, y) + z


def _columns(xp: Namespace, x: Inputs, h: Array) -> Array:
    """(..., D) as (..., D / N, N, 1)."""
    return xp.reshape(h, (*h.shape[:-1], *x.A.shape[-3:-1], 1))


def _flat(xp: Namespace, h: Array) -> Array:
    """The inverse."""
    return xp.reshape(h, (*h.shape[:-3], h.shape[-3] * h.shape[-2]))
