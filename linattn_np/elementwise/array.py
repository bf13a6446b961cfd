"""The recurrence by array calls, as prefixes of affine maps, and its adjoint, which is the same on reversed tokens.

    (a_t, x_t) o ... o (a_1, x_1) o h_0 = h_t
    p_t = a*_{t+1} p_{t+1} + dout_t,   a_{T+1} p_{T+1} = the gradient of h_T

No decay is divided by, and no sum of logs is exponentiated: any a, 0 too, is exact.
"""

from __future__ import annotations

from functools import partial

from ..ops.associative import prefixes
from ..runtime.arrays import Array, Namespace
from .definition import gradients
from .maps import act, adjoint, composed, factors, outer, unit
from .types import Inputs


def forward(xp: Namespace, x: Inputs, h: Array, chunk_size: int | None) -> tuple[Array, Array]:
    """As definition.forward; chunk_size: tokens of one scan, None for all."""
    states, end = states_of(xp, every_token(xp, x), h, chunk_size)
    return states, end * 1  # in its own memory: it lies among the states


def every_token(xp: Namespace, x: Inputs) -> Inputs:
    """Factors of every token, as they are."""
    a = factors(xp, x)
    a = xp.broadcast_to(a, (*x.x.shape[:-1], *a.shape[-x.gate_axes :])) if x.is_constant else a
    return Inputs(x.x, a) if x.A is None else Inputs(x.x, A=a)


def states_of(xp: Namespace, x: Inputs, h: Array, chunk_size: int | None) -> tuple[Array, Array]:
    """(h_1..h_T, h_T) of factors of every token."""
    T, found, of_gate = x.x.shape[-2], [], -1 - x.gate_axes
    for t in range(0, T, chunk_size or max(T, 1)):
        part = x.tokens(t, t + (chunk_size or T))
        b, y = xp.moveaxis(part.gate, of_gate, 0), xp.moveaxis(part.x, -2, 0)
        y = xp.concat([y[:1, ...] + act(xp, x, b[:1, ...], h[None, ...]), y[1:, ...]], axis=0)
        states = prefixes(xp, partial(composed, xp, x), (xp.astype(b, y.dtype), y))[1]
        h = states[-1, ...]
        found.append(xp.moveaxis(states, 0, -2))
    if not found:
        return xp.astype(x.x, h.dtype), h
    return found[0] if len(found) == 1 else xp.concat(found, axis=-2), h


def backward(
    xp: Namespace, x: Inputs, h: Array, dout: Array | None, p: Array, chunk_size: int | None
) -> tuple[Inputs, Array]:
    """As definition.backward."""
    own = every_token(xp, x)
    states, _ = states_of(xp, own, h, chunk_size)
    if not x.x.shape[-2]:
        return Inputs(*(None if y is None else xp.zeros_like(y) for y in x)), p
    a, axis = adjoint(xp, x, own.gate), -1 - x.gate_axes
    first = own.gates(a, 0, 1)
    later = xp.concat([own.gates(a, 1), unit(xp, x, first)], axis=axis)
    d = xp.zeros_like(states) if dout is None else dout
    backwards = own.with_gate(xp.flip(d, axis=-2), xp.flip(later, axis=axis))
    P, begin = states_of(xp, backwards, p, chunk_size)
    dx = xp.asarray(xp.flip(P, axis=-2), copy=True)  # not a view: other libraries take no negative strides
    before = xp.concat([xp.broadcast_to(h, begin.shape)[..., None, :], states[..., :-1, :]], axis=-2)
    begin = act(xp, x, xp.moveaxis(first, axis, 0)[0, ...], begin)
    return gradients(xp, x, factors(xp, x), dx, outer(xp, x, dx, before)), begin
