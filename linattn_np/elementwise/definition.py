"""The definition, token by token, and its adjoint. Not optimised: every other backend is tested against it.

    h_t = a_t h_{t-1} + x_t

p_t, the gradient of h_t through its own output and all later ones, goes backwards; * is the complex conjugate:

    p_t = dout_t + a*_{t+1} p_{t+1},   dx_t = p_t,   da_t = p_t h*_{t-1},   dg_t = a*_t da_t

Gradients of complex arrays are dRe + i dIm. Of matrices * is the conjugate transpose, and the order is this one.
"""

from __future__ import annotations

from ..runtime.arrays import Array, Namespace, over_tokens
from .maps import act, adjoint, factors, outer
from .types import Inputs


def forward(xp: Namespace, x: Inputs, h: Array, chunk_size: int | None) -> tuple[Array, Array]:
    """(the states h_1..h_T (..., T, D), h_T) of one sequence; h: h_0."""
    a, states = factors(xp, x), []
    for t in range(x.x.shape[-2]):
        h = act(xp, x, token(x, a, t), h) + x.x[..., t, :]
        states.append(h)
    return xp.stack(states, axis=-2) if states else xp.astype(x.x, h.dtype), h


def token(x: Inputs, a: Array, t: int) -> Array:
    """The factors of token t."""
    return a if x.is_constant else a[(..., t, *(slice(None),) * x.gate_axes)]


def backward(
    xp: Namespace, x: Inputs, h: Array, dout: Array | None, p: Array, chunk_size: int | None
) -> tuple[Inputs, Array]:
    """(gradients of the inputs, of h_0); p: the gradient of h_T."""
    states, _ = forward(xp, x, h, chunk_size)
    a, T, dx, da = factors(xp, x), x.x.shape[-2], [], []
    for t in reversed(range(T)):
        p = p if dout is None else p + dout[..., t, :]
        dx.append(p)
        da.append(outer(xp, x, p, states[..., t - 1, :] if t else h))
        p = act(xp, x, adjoint(xp, x, token(x, a, t)), p)
    if not T:
        return Inputs(*(None if y is None else xp.zeros_like(y) for y in x)), p
    return gradients(xp, x, a, xp.stack(dx[::-1], axis=-2), xp.stack(da[::-1], axis=-1 - x.gate_axes)), p


def gradients(xp: Namespace, x: Inputs, a: Array, dx: Array, da: Array) -> Inputs:
    """The gradients by input, from those of x_t and a_t."""
    da = over_tokens(xp, da, x.gate_axes) if x.is_constant else da
    return x.with_gate(dx, da if x.g is None else adjoint(xp, x, a) * da)
