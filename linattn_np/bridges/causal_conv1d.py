"""causal-conv1d's functions for torch tensors (B, D, T): its names, order of arguments and states."""

from __future__ import annotations

from typing import Any

import torch

from .. import nn
from ..runtime.doorway import WHOLE, expect, expect_whole
from ..runtime.pools import NO_ROW
from ..runtime.values import is_word, shown
from . import torch as _  # noqa: F401  # here, since torch.compile cannot trace the import in a first call
from .packed import offsets_of_numbers
from .pools import Pool

Tensor = torch.Tensor
ACTIVATIONS = ("silu", "swish")


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
    (B, D, W - 1). Returns y, or (y, the last W - 1 inputs) with
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
    rows, state = x.transpose(1, 2), initial_states
    if seq_idx is not None and x.numel():
        y = nn.short_conv(rows.reshape(1, -1, x.shape[1]), weight, bias, activation=activation,
                          cu_seqlens=offsets_of_numbers(seq_idx))  # fmt: skip
        return y.reshape(rows.shape).transpose(1, 2)
    state = None if state is None else state.to(x.dtype).transpose(1, 2)
    found = nn.short_conv(rows, weight, bias, state=state, activation=activation, return_state=return_final_states)
    if not return_final_states:
        return found.transpose(1, 2)
    y, end = found.out.transpose(1, 2), found.state.transpose(1, 2)
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
    before = past[..., : W - 1].transpose(1, 2)
    y = nn.short_conv(taken.transpose(1, 2), weight, bias, state=before, activation=activation).transpose(1, 2)
    return y.to(x.dtype) if x.ndim == 3 else y[..., 0].to(x.dtype)


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
