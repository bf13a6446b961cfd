"""The definition, token by token, and its adjoint. Not optimised: every other backend is tested against it.

    h_t = a_t h_{t-1} + x_t

p_t, the gradient of h_t through its own output and all later ones, goes backwards; * is the complex conjugate:

    p_t = dout_t + a*_{t+1} p_{t+1},   dx_t = p_t,   da_t = p_t h*_{t-1},   dg_t = a*_t da_t

Gradients of complex arrays are dRe + i dIm.
"""

from __future__ import annotations

from ..runtime.arrays import Array, Namespace, conjugate, over_tokens
from .types import Inputs


def factors(xp: Namespace, x: Inputs) -> Array:
    """a_t, or e^{g_t}."""
    return x.a if x.g is None else xp.exp(x.g)


def forward(xp: Namespace, x: Inputs, h: Array, chunk_size: int | None) -> tuple[Array, Array]:
    """(the states h_1..h_T (..., T, D), h_T) of one sequence; h: h_0."""
    a, states = factors(xp, x), []
    for t in range(x.x.shape[-2]):
        h = (a if x.is_constant else a[..., t, :]) * h + x.x[..., t, :]
        states.append(h)
    return xp.stack(states, axis=-2) if states else x.x, h


def backward(
    xp: Namespace, x: Inputs, h: Array, dout: Array | None, p: Array, chunk_size: int | None
) -> tuple[Inputs, Array]:
    """(gradients of the inputs, of h_0); p: the gradient of h_T."""
    states, _ = forward(xp, x, h, chunk_size)
    a, T, dx, da = factors(xp, x), x.x.shape[-2], [], []
    for t in reversed(range(T)):
        p = p if dout is None else p + dout[..., t, :]
        dx.append(p)
        da.append(p * conjugate(xp, states[..., t - 1, :] if t else h))
        p = conjugate(xp, a if x.is_constant else a[..., t, :]) * p
    if not T:
        return Inputs(*(None if y is None else xp.zeros_like(y) for y in x)), p
    return gradients(xp, x, a, xp.stack(dx[::-1], axis=-2), xp.stack(da[::-1], axis=-2)), p


def gradients(xp: Namespace, x: Inputs, a: Array, dx: Array, da: Array) -> Inputs:
    """The gradients by input, from those of x_t and a_t."""
    da = over_tokens(xp, da) if x.is_constant else da
    return Inputs(dx, da) if x.g is None else Inputs(dx, None, conjugate(xp, a) * da)
