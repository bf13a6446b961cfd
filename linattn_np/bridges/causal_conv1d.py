"""causal-conv1d's functions for torch tensors (B, D, T): its names, order of arguments and states."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from .packed import position_of

Tensor = torch.Tensor
ACTIVATIONS = (None, "silu", "swish")


def causal_conv1d_fn(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None, return_final_states: bool = False, final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> Any:
    """y_t = act(bias + sum_i weight_{W-1-i} x_{t-i}) of every channel.

    x (B, D, T), weight (D, W), bias (D,), seq_idx (B, T): tokens of one number are one sequence, initial_states
    (B, D, W - 1). Returns y, or (y, the last W - 1 inputs) with return_final_states.
    """
    fn = "causal_conv1d_fn"
    check(fn, x, weight, activation)
    if seq_idx is not None and (initial_states is not None or return_final_states):
        raise ValueError(f"{fn}: seq_idx is given together with states, expected one of them")
    W = weight.shape[-1]
    past = x if initial_states is None else torch.cat([initial_states.to(x.dtype), x], dim=-1)
    position = None if seq_idx is None else position_of(seq_idx)
    y = activated(convolved(past, weight, bias, position)[..., past.shape[-1] - x.shape[-1] :], activation)
    if not return_final_states:
        return y
    end = F.pad(past, (max(W - 1 - past.shape[-1], 0), 0))[..., past.shape[-1] - W + 1 :] if W > 1 else past[..., :0]
    return y, end if final_states_out is None else final_states_out.copy_(end)


def causal_conv1d_update(
    x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None,
    cache_seqlens: Tensor | None = None, conv_state_indices: Tensor | None = None,
) -> Tensor:
    """The next tokens: x (B, D) or (B, D, T); conv_state (B, D, S), the last S >= W - 1 inputs, is updated in place."""
    fn = "causal_conv1d_update"
    for name, given in (("cache_seqlens", cache_seqlens), ("conv_state_indices", conv_state_indices)):
        if given is not None:
            raise ValueError(f"{fn}: {name} is not supported, expected None")
    check(fn, x, weight, activation)
    new = x if x.ndim == 3 else x[..., None]
    S, T, W = conv_state.shape[-1], new.shape[-1], weight.shape[-1]
    past = torch.cat([conv_state, new.to(conv_state.dtype)], dim=-1)
    conv_state.copy_(past[..., T:])
    taps = past[..., S + 1 - W :].unfold(-1, W, 1)  # (B, D, T, W)
    y = (taps.to(weight.dtype) * weight[:, None, :]).sum(-1)
    y = activated(y if bias is None else y + bias[:, None], activation).to(x.dtype)
    return y if x.ndim == 3 else y[..., 0]


def check(fn: str, x: Tensor, weight: Tensor, activation: str | None) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"{fn}: activation is {activation!r}, expected None, 'silu' or 'swish'")
    if weight.ndim != 2 or weight.shape[0] != x.shape[1]:
        raise ValueError(f"{fn}: weight has shape {tuple(weight.shape)}, expected (D, W) with D = {x.shape[1]}")


def convolved(x: Tensor, weight: Tensor, bias: Tensor | None, position: Tensor | None) -> Tensor:
    """The convolution of (B, D, T) in the memory order (B, T, D); position (B, T) as in ops/short_conv.py."""
    rows, taps = x.transpose(1, 2).to(weight.dtype), weight.t()
    y = rows * taps[-1] if bias is None else torch.addcmul(bias, rows, taps[-1])
    for i in range(1, min(len(taps), rows.shape[1])):
        past = rows[:, :-i]
        if position is not None:
            past = torch.where((position[:, i:] >= i)[..., None], past, 0)
        y = torch.cat([y[:, :i], torch.addcmul(y[:, i:], past, taps[-1 - i])], dim=1)
    return y.transpose(1, 2).to(x.dtype)


def activated(y: Tensor, activation: str | None) -> Tensor:
    return y if activation is None else F.silu(y)
