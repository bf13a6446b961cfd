"""Causal short convolution of every channel with its own few weights, before most linear attention layers.

    z_t = bias + sum_{i < W} weight_{W-1-i} x_{t-i}        y_t = act(z_t) (+ x_t)

    dz_t = act'(z_t) dy_t,   dx_t = sum_i weight_{W-1-i} dz_{t+i} (+ dy_t),   dweight_{W-1-i} = sum_t dz_t x_{t-i}

Time before channels: x (..., T, D), weight (D, W), bias (D,). Inputs before the first token are the last of the S of
`state` (..., S, D), S >= W - 1, or 0; sequences.py says which tokens belong together.
"""

from __future__ import annotations

from typing import NamedTuple

from ..runtime.arrays import Array, over_tokens
from .gates import silu, silu_vjp
from .sequences import Sequences


class ShortConv(NamedTuple):
    """Weights of a convolution, its bias, its activation (None or "silu"), and whether the input is added."""

    weight: Array
    bias: Array | None = None
    activation: str | None = None
    residual: bool = False


class ShortConvGrads(NamedTuple):
    """Gradients of short_conv; None for arrays that were not given."""

    x: Array
    weight: Array
    bias: Array | None
    state: Array | None


def short_conv(sequences: Sequences, x: Array, conv: ShortConv, state: Array | None = None) -> Array:
    """y (..., T, D)."""
    z = _linear(sequences, x, conv, state)
    y = silu(sequences.xp, z) if conv.activation == "silu" else z
    return y + x if conv.residual else y


def short_conv_vjp(sequences: Sequences, x: Array, conv: ShortConv, state: Array | None, dy: Array) -> ShortConvGrads:
    """The gradients through y; `sequences.last_vjp` has the gradients through the final state."""
    xp, W = sequences.xp, conv.weight.shape[-1]
    dz = silu_vjp(xp, _linear(sequences, x, conv, state), dy) if conv.activation == "silu" else dy
    dx, dstate, taps = dy if conv.residual else xp.zeros_like(dy), None, []
    for i in range(W):
        taps.append(over_tokens(xp, dz * sequences.before(x, state, i)))
        d, more = sequences.before_vjp(dz * conv.weight[:, W - 1 - i], state, i)
        dx, dstate = dx + d, more if dstate is None else dstate + more
    return ShortConvGrads(dx, xp.stack(taps[::-1], axis=-1), None if conv.bias is None else over_tokens(xp, dz), dstate)


def _linear(sequences: Sequences, x: Array, conv: ShortConv, state: Array | None) -> Array:
    """z, the current token first."""
    W = conv.weight.shape[-1]
    z = x * conv.weight[:, W - 1]
    for i in range(1, W):
        z = z + sequences.before(x, state, i) * conv.weight[:, W - 1 - i]
    return z if conv.bias is None else z + conv.bias
