"""Gradients of one token on deferred arrays, by the definition: what around them is deferred shares their launches."""

from __future__ import annotations

from typing import Any

from ....runtime.arrays import Array, cast, sum_to, swap
from ... import definition
from ...heads import groups, initial_state, join_state, split, split_all, take
from ...types import Inputs
from .token import Token


def takes(token: Token) -> bool:
    """Whether `backward` computes the gradients of a call."""
    return token.inputs.q is not None and token.inputs.v.shape[-3] == 1


def backward(token: Token, dout: Array | None, dstate: Array | None) -> tuple[Inputs, Array]:
    """Gradients of every input, and of the initial state."""
    x, state, plan = token
    xp, G = plan.xp, groups(x)
    core = take(xp, split_all(xp, x, G), 0, 1, plan.dtype)
    S, dS = (initial_state(core, plan, y, None, G) for y in (state, dstate))
    d_out = None if dout is None else cast(xp, split(xp, dout, G), plan.dtype)
    grads, dS_0 = definition.step_vjp(xp, core, plan, definition.step_fwd(xp, core, plan, S), d_out, dS)
    found = {name: _joined(xp, d, getattr(x, name).shape) for name, d in grads.items()}
    if x.q is not None and dout is None:
        found["q"] = xp.zeros_like(cast(xp, x.q, plan.dtype))
    return Inputs(**{name: found.get(name) for name in Inputs._fields}), join_state(xp, dS_0)


def _joined(xp: Any, d: Array, shape: tuple[int, ...]) -> Array:
    """d (..., G, R, 1, D) as (..., 1, H, D), summed over the heads and sequences that share the array."""
    *lead, H, D = shape
    if not lead:  # u
        return xp.reshape(sum_to(xp, d, (d.shape[-4], H // d.shape[-4], 1, D)), shape)
    G = d.shape[-4]
    d = sum_to(xp, d, (*lead[:-1], G, H // G, 1, D))
    return swap(xp, xp.reshape(d, (*lead[:-1], H, 1, D)), -3)
