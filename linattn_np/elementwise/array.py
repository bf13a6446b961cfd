"""The recurrence by array calls, as prefixes of affine maps, and its adjoint, which is the same on reversed tokens.

    (a_t, x_t) o ... o (a_1, x_1) o h_0 = h_t
    p_t = a*_{t+1} p_{t+1} + dout_t,   a_{T+1} p_{T+1} = the gradient of h_T

No decay is divided by, and no sum of logs is exponentiated: any a, 0 too, is exact.
"""

from __future__ import annotations

from ..ops.associative import affine, prefixes
from ..runtime.arrays import Array, Namespace, conjugate
from .definition import factors, gradients
from .types import Inputs


def forward(xp: Namespace, x: Inputs, h: Array, chunk_size: int | None) -> tuple[Array, Array]:
    """As definition.forward; chunk_size: tokens of one scan, None for all."""
    a = factors(xp, x)
    return states_of(xp, xp.broadcast_to(a, x.x.shape) if x.is_constant else a, x.x, h, chunk_size)


def states_of(xp: Namespace, a: Array, x: Array, h: Array, chunk_size: int | None) -> tuple[Array, Array]:
    """(h_1..h_T, h_T) of arrays (..., T, D)."""
    T, found = x.shape[-2], []
    for t in range(0, T, chunk_size or max(T, 1)):
        part = slice(t, t + (chunk_size or T))
        b, y = (xp.moveaxis(z[..., part, :], -2, 0) for z in (a, x))
        y = xp.concat([y[:1, ...] + b[:1, ...] * h, y[1:, ...]], axis=0)
        states = prefixes(xp, affine, (xp.astype(b, y.dtype), y))[1]
        h = states[-1, ...]
        found.append(xp.moveaxis(states, 0, -2))
    if not found:
        return x, h
    return found[0] if len(found) == 1 else xp.concat(found, axis=-2), h


def backward(
    xp: Namespace, x: Inputs, h: Array, dout: Array | None, p: Array, chunk_size: int | None
) -> tuple[Inputs, Array]:
    """As definition.backward."""
    states, _ = forward(xp, x, h, chunk_size)
    a, T = factors(xp, x), x.x.shape[-2]
    if not T:
        return Inputs(*(None if y is None else xp.zeros_like(y) for y in x)), p
    conj = conjugate(xp, xp.broadcast_to(a, x.x.shape) if x.is_constant else a)
    later = xp.concat([conj[..., 1:, :], xp.ones_like(conj[..., :1, :])], axis=-2)
    d = xp.zeros_like(states) if dout is None else dout
    backwards, first = states_of(xp, xp.flip(later, axis=-2), xp.flip(d, axis=-2), p, chunk_size)
    dx = xp.flip(backwards, axis=-2)
    before = xp.concat([xp.broadcast_to(h, first.shape)[..., None, :], states[..., :-1, :]], axis=-2)
    return gradients(xp, x, a, dx, dx * conjugate(xp, before)), conj[..., 0, :] * first
