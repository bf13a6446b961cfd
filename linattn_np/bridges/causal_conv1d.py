"""causal-conv1d's functions for torch tensors (B, D, T): its names, order of arguments and states."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from ..ops.cpu import short_conv as compiled
from ..runtime.doorway import WHOLE, expect, expect_whole
from ..runtime.pools import NO_ROW
from ..runtime.values import is_word, shown
from .packed import position_of
from .pools import Pool
from .torch.pieces import Loops, Piece

Tensor = torch.Tensor
ACTIVATIONS = ("silu", "swish")


class Conv(NamedTuple):
    """As ops/short_conv.py's ShortConv, in torch; position (B, T)."""

    weight: Tensor
    bias: Tensor | None
    activation: str | None
    position: Tensor | None


class ConvGradients(NamedTuple):
    """Gradients of the convolution; bias None without one."""

    x: Tensor
    taps: Tensor
    bias: Tensor | None


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> Any:
    """y_t = act(bias + sum_i weight_{W-1-i} x_{t-i}) of every channel.

    x (B, D, T), weight (D, W), bias (D,), seq_idx (B, T): tokens of one number are one sequence, initial_states
    (B, D, W - 1). Products are in the wider dtype of x and weight. Returns y, or (y, the last W - 1 inputs) with
    return_final_states: (B, D, W - 1) for every T, zeros
    before the first token. Raises TypeError or ValueError for tensors that do not fit.
    """
    fn = "causal_conv1d_fn"
    sizes = check(fn, x, weight, bias, activation)
    W = sizes["W"]
    expect(fn, sizes | {"W-1": W - 1}, initial_states=(initial_states, "B D W-1?"),
           final_states_out=(final_states_out, "B D W-1?"))  # fmt: skip
    if seq_idx is not None and (initial_states is not None or return_final_states):
        raise ValueError(f"{fn}: seq_idx is given together with states, expected one of them")
    expect(fn, sizes, WHOLE, seq_idx=(seq_idx, "B T?"))
    past = x if initial_states is None else torch.cat([initial_states.to(x.dtype), x], dim=-1)
    conv = Conv(weight, bias, activation, None if seq_idx is None else position_of(seq_idx))
    y = convolved(past, conv)[..., past.shape[-1] - x.shape[-1] :]
    if not return_final_states:
        return y
    padded = F.pad(past, (max(W - 1 - past.shape[-1], 0), 0))
    end = padded[..., padded.shape[-1] - (W - 1) :]
    return y, end if final_states_out is None else final_states_out.copy_(end)


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
    pad_slot_id: int = NO_ROW,
) -> Tensor:
    """The next tokens: x (B, D) or (B, D, T); conv_state (B, D, S), the last S >= W - 1 inputs, is updated in place.

    cache_seqlens (B,): conv_state is a ring in which token p is in place p mod S, and so many tokens have been before.
    conv_state_indices (B,): conv_state is a pool (P, D, S); these are the rows; a sequence whose row is
    pad_slot_id begins with zeros, and none is read or written for it. Rows on a device are not checked.
    Raises TypeError or ValueError for tensors that do not fit.
    """
    fn = "causal_conv1d_update"
    sizes = check(fn, x, weight, bias, activation)
    one = "B" if conv_state_indices is None else "P"
    S, W = expect(fn, sizes, conv_state=(conv_state, f"{one} D S"))["S"], sizes["W"]
    if S < W - 1:
        raise ValueError(
            f"{fn}: conv_state has shape {tuple(conv_state.shape)}, expected ({one}, D, S) with S >= {W - 1}"
        )
    expect(fn, sizes, WHOLE, cache_seqlens=(cache_seqlens, "B?"))
    pool = None
    if conv_state_indices is not None:
        pool = Pool(fn, "conv_state_indices", conv_state, conv_state_indices, pad_slot_id, sizes["B"])
    new, state = x if x.ndim == 3 else x[..., None], conv_state if pool is None else pool.states()
    taken = new.to(state.dtype)
    past, end = in_line(state, taken, W) if cache_seqlens is None else in_ring(state, taken, cache_seqlens, W)
    conv_state.copy_(end) if pool is None else pool.put(end)
    if not new.shape[-1]:
        return torch.zeros_like(x)
    taps = past.unfold(-1, W, 1)  # (B, D, T, W)
    dtype = torch.promote_types(x.dtype, weight.dtype)
    y = (taps.to(dtype) * weight[:, None, :].to(dtype)).sum(-1)
    y = activated(y if bias is None else y + bias[:, None].to(dtype), activation).to(x.dtype)
    return y if x.ndim == 3 else y[..., 0]


def in_line(state: Tensor, new: Tensor, W: int) -> tuple[Tensor, Tensor]:
    """(the W - 1 inputs before the new ones and these, the last S inputs)."""
    past, S = torch.cat([state, new], dim=-1), state.shape[-1]
    return past[..., S + 1 - W :], past[..., new.shape[-1] :]


def in_ring(state: Tensor, new: Tensor, count: Tensor, W: int) -> tuple[Tensor, Tensor]:
    """The same of a ring: token p is in place p mod S, and the first new one is token `count` (B,)."""
    S, T = state.shape[-1], new.shape[-1]

    def places(first: int, stop: int) -> Tensor:
        """(B, D, stop - first): where the tokens count + first.. are."""
        p = count.long()[:, None] + torch.arange(first, stop, device=count.device)
        return (p % max(S, 1))[:, None].expand(-1, state.shape[1], -1)

    stored = min(S, T)
    past = torch.cat([state.gather(-1, places(1 - W, 0)), new], dim=-1)
    return past, state.scatter(-1, places(T - stored, T), new[..., T - stored :])


def check(fn: str, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> dict[str, Any]:
    """The sizes B, D, W, and T where x (B, D, T) has it."""
    if not is_word(activation, ACTIVATIONS) and activation is not None:
        raise ValueError(f"{fn}: activation is {shown(activation)}, expected None, 'silu' or 'swish'")
    axes = "B D" if fn.endswith("update") and getattr(x, "ndim", 3) == 2 else "B D T"
    sizes = expect(fn, x=(x, axes), weight=(weight, "D W"), bias=(bias, "D?"))
    expect_whole(fn, "W of weight", sizes["W"])
    return sizes


def convolved(x: Tensor, conv: Conv) -> Tensor:
    """The convolution of (B, D, T), in the memory order (B, T, D)."""
    dtype, bias = torch.promote_types(x.dtype, conv.weight.dtype), conv.bias
    y = convolution(x=x.transpose(1, 2).to(dtype), taps=conv.weight.t().to(dtype),
                    bias=None if bias is None else bias.to(dtype),
                    position=conv.position, silu=conv.activation is not None)  # fmt: skip
    return y.transpose(1, 2).to(x.dtype)


def by_torch(x: Tensor, taps: Tensor, bias: Tensor | None, position: Tensor | None, silu: bool) -> Tensor:
    """y_t = act(bias + sum_i taps_{W-1-i} x_{t-i}) of x (B, T, D), taps (W, D), the last one for the current token.

    Operations on whole tensors, which transforms and compilers follow; torch's conv1d takes longer.
    """
    y = x * taps[-1] if bias is None else torch.addcmul(bias, x, taps[-1])
    for i in range(1, min(len(taps), x.shape[1])):
        y = y + F.pad(reached(x[:, :-i], i, position) * taps[-1 - i], (0, 0, i, 0))
    return F.silu(y) if silu else y


def with_pullback(_: Any, given: Any) -> tuple[Tensor, Any]:
    """The same in one tensor:  dx_t = sum_i taps_{W-1-i} dy_{t+i},  dtaps_{W-1-i} = sum_t dy_t x_{t-i}."""
    x, taps, bias, position, silu = given.values()
    y = x * taps[-1] if bias is None else torch.addcmul(bias, x, taps[-1])
    for i in range(1, min(len(taps), x.shape[1])):
        y[:, i:].addcmul_(reached(x[:, :-i], i, position), taps[-1 - i])

    def pullback(dy: Tensor) -> ConvGradients:
        dy = torch.ops.aten.silu_backward(dy, y) if silu else dy
        dx, dtaps = dy * taps[-1], torch.zeros_like(taps)
        dtaps[-1] = (dy * x).sum((0, 1))
        for i in range(1, min(len(taps), x.shape[1])):
            d = reached(dy[:, i:], i, position)
            dx[:, :-i].addcmul_(d, taps[-1 - i])
            dtaps[-1 - i] = (d * x[:, :-i]).sum((0, 1))
        return ConvGradients(dx, dtaps, None if bias is None else dy.sum((0, 1)))

    return F.silu(y) if silu else y, pullback


def by_loops(x: Any, taps: Any, bias: Any, position: Any, silu: bool) -> Any:
    return compiled.short_conv(x, compiled.Taps(taps, bias, silu), compiled.Tokens(positions(x, position)))


def by_loops_vjp(x: Any, taps: Any, bias: Any, position: Any, silu: bool, dy: Any) -> Any:
    return compiled.short_conv_vjp(x, compiled.Taps(taps, bias, silu), compiled.Tokens(positions(x, position)), dy)


def positions(x: np.ndarray, position: np.ndarray | None) -> np.ndarray:
    """(B, T)."""
    if position is None:
        return np.broadcast_to(np.arange(x.shape[1]), x.shape[:2])
    return position


convolution = Piece(
    "short_conv(Tensor x, Tensor taps, Tensor? bias, Tensor? position, bool silu)", ConvGradients._fields,
    Loops(by_loops, by_loops_vjp), by_torch, with_pullback)  # fmt: skip


def reached(x: Tensor, i: int, position: Tensor | None) -> Tensor:
    """x (B, T - i, D) where token t + i and the one i places before belong to one sequence, else 0."""
    return x if position is None else torch.where((position[:, i:] >= i)[..., None], x, 0)


def activated(y: Tensor, activation: str | None) -> Tensor:
    return y if activation is None else F.silu(y)
