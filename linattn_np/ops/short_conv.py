"""Causal short convolution of every channel with its own few weights, before most linear attention layers.

    y_t = act(bias + sum_{i < W} weight_{W-1-i} x_{t-i})        x_{t-i} before the first token: from the state, or 0

Time before channels: x (..., T, D), weight (D, W), bias (D,); the state holds the last inputs, (..., S, D) with
S >= W - 1, oldest first.
"""

from __future__ import annotations

from typing import NamedTuple

from ..runtime.arrays import Array, Namespace, device, over_tokens
from .gates import silu, silu_vjp


class ShortConv(NamedTuple):
    """Weights of a convolution, its bias and its activation.

    position (T,): the number of each token within its sequence; no tap reaches past the first token of a sequence.
    """

    weight: Array
    bias: Array | None = None
    activation: str | None = None
    position: Array | None = None


class ShortConvGrads(NamedTuple):
    """Gradients of short_conv; None for arrays that were not given."""

    x: Array
    weight: Array
    bias: Array | None
    state: Array | None


def short_conv(xp: Namespace, x: Array, conv: ShortConv, state: Array | None = None) -> tuple[Array, Array]:
    """(y, the state after the last token: as many inputs as `state` holds, W - 1 without one)."""
    past = _with_past(xp, x, conv, state)
    y = _linear(xp, x, past, conv)
    return (silu(xp, y) if conv.activation == "silu" else y), past[..., x.shape[-2] :, :]


def short_conv_vjp(
    xp: Namespace, x: Array, conv: ShortConv, state: Array | None, dy: Array, dstate: Array | None = None
) -> ShortConvGrads:
    """dx_t = sum_i weight_{W-1-i} dy_{t+i},  dweight_{W-1-i} = sum_t dy_t x_{t-i}, of y before its activation."""
    past, (T, W) = _with_past(xp, x, conv, state), (x.shape[-2], conv.weight.shape[-1])
    if conv.activation == "silu":
        dy = silu_vjp(xp, _linear(xp, x, past, conv), dy)
    S, taps = past.shape[-2] - T, []
    dpast = _between_zeros(xp, dy * conv.weight[:, W - 1], S, 0)
    for i in range(W):
        here = _reached(xp, dy, i, conv.position)
        taps.append(over_tokens(xp, here * past[..., S - i : S - i + T, :]))
        if i:
            dpast = dpast + _between_zeros(xp, here * conv.weight[:, W - 1 - i], S - i, i)
    if dstate is not None:
        dpast = dpast + _between_zeros(xp, dstate, T, 0)
    return ShortConvGrads(dpast[..., S:, :], xp.stack(taps[::-1], axis=-1),
                          None if conv.bias is None else over_tokens(xp, dy),
                          None if state is None else dpast[..., :S, :])  # fmt: skip


def _with_past(xp: Namespace, x: Array, conv: ShortConv, state: Array | None) -> Array:
    """(..., S + T, D): the inputs before the first token, then x."""
    return _between_zeros(xp, x, conv.weight.shape[-1] - 1, 0) if state is None else xp.concat([state, x], axis=-2)


def _between_zeros(xp: Namespace, x: Array, before: int, after: int) -> Array:
    """x (..., T, D) with so many tokens of zeros on both sides."""
    lead, D = x.shape[:-2], x.shape[-1]
    zeros = [xp.zeros((*lead, n, D), dtype=x.dtype, device=device(x)) for n in (before, after)]
    return xp.concat([zeros[0], x, zeros[1]], axis=-2)


def _linear(xp: Namespace, x: Array, past: Array, conv: ShortConv) -> Array:
    """The convolution without its activation, the current token first."""
    T, W = x.shape[-2], conv.weight.shape[-1]
    S = past.shape[-2] - T
    y = x * conv.weight[:, W - 1]
    for i in range(1, W):
        y = y + _reached(xp, past[..., S - i : S - i + T, :], i, conv.position) * conv.weight[:, W - 1 - i]
    return y if conv.bias is None else y + conv.bias


def _reached(xp: Namespace, x: Array, i: int, position: Array | None) -> Array:
    """x where the token i places before belongs to the same sequence, else 0."""
    return x if position is None or not i else xp.where((position >= i)[:, None], x, xp.zeros_like(x))
