"""What layers of transformers do around a recurrence: the cached state of a step, MiniMax's and xLSTM's methods."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import linattn_np as la

from ..ops.gated_norm import GatedNorm
from .mamba_ssm import selective_scan_fn
from .modules import gated_rms_norm

Tensor = torch.Tensor


def step(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A recurrent function as layers call it with a cached state, which they replace by the new one: in its place."""

    @functools.wraps(fn)
    def call(*args: Any, **keywords: Any) -> Any:
        state = keywords.get("initial_state")
        in_place = keywords.get("output_final_state") and not torch.is_grad_enabled()
        if state is not None and in_place and not torch.compiler.is_compiling():
            keywords["overwrite_state"] = state.dtype in (torch.float32, torch.float64) and state.is_contiguous()
        return fn(*args, **keywords)

    return call


def selective_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None, z: Tensor | None = None,
    delta_bias: Tensor | None = None, delta_softplus: bool = False, return_last_state: bool = False,
    use_mambapy: bool | None = None, use_associative_scan: bool | None = None,
) -> Any:  # fmt: skip
    """mamba_selective_scan of (B, D, T); its ways of computing in torch, the last two, are not chosen here."""
    return selective_scan_fn(x, dt, A, B, C, D, z, delta_bias, delta_softplus, return_last_state)


def rnn_scan(
    self: Any, x: Tensor, recurrent_gate: Tensor, reset: Tensor, recurrent_states: Tensor | None = None,
    acc_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """RecurrentGemmaRglru._rnn_scan of (B, T, D): (h_t = a_t h_{t-1} + x_t, h_T), a_t = 0 where reset."""
    a = (recurrent_gate * ~reset).to(acc_dtype)
    out, end = la.scan(a, x.to(acc_dtype), state=recurrent_states, return_state=True)
    return out.to(x.dtype), end


def gated_norm(self: Any, hidden_states: Tensor, gate: Tensor) -> Tensor:
    """The forward of the gated RMS norms after a delta rule: norm(x) weight act(gate)."""
    how = GatedNorm(self.variance_epsilon, self.activation)
    return gated_rms_norm(hidden_states, gate.to(hidden_states.dtype), self.weight, how)


def lightning_attention(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: Any,
    attention_mask: Tensor | None,
    cache: Any = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """MiniMaxLightningAttention.forward: (output, state (B, H, K, V)); the cache has the state in the values' dtype."""
    qkv = self.act_fn(self.qkv_proj(hidden_states))
    if attention_mask is not None:
        qkv = (qkv * attention_mask[:, :, None]).to(qkv.dtype)
    q, k, v = qkv.unflatten(-1, (self.num_attention_heads, 3 * self.head_dim)).split(self.head_dim, dim=-1)
    state = None if cache is None else cache.get_linear_cache(self.layer_idx)
    out, end = la.lightning_attention(q, k, v, self.slope_rate.reshape(-1), state=state, return_state=True,
                                      cu_seqlens=cu_seqlens)  # fmt: skip
    end = end.to(v.dtype)
    out = torch.sigmoid(self.output_gate(hidden_states)) * self.norm(out.flatten(2))
    if cache is not None:
        cache.set_linear_cache(self.layer_idx, end)
    return self.out_proj(out), end


def mlstm(
    self: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    igate: Tensor,
    fgate: Tensor,
    c_initial: Tensor | None = None,
    n_initial: Any = None,
    m_initial: Any = None,
    return_last_states: bool | None = None,
    mode: str | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor] | None]:
    """xLSTMBackend.forward of (B, H, T, D): (h, (C, n, m (B, H, 1))), any T in every mode.

        m_t = max(log f_t + m_{t-1}, i_t)
        [num, den] = simple_gla of e^{i - m} [v, 1]          h = num / (max(|den|, e^{-m}) + eps)

    la.mlstm is this without eps. (h, None) in training where no states are given and none are asked for: the layer
    unpacks a pair.
    """
    log_f, i = F.logsigmoid(fgate.float()).mT, igate.float().mT  # (B, T, H)
    state, begin = None, torch.zeros_like(i[:, 0])
    if c_initial is not None:
        state, begin = torch.cat([c_initial, n_initial[..., None]], dim=-1).float(), m_initial[..., 0].float()
    m = running_maximum(log_f, i, begin)
    before = torch.cat([begin[:, None], m[:, :-1]], dim=1)
    write, g = torch.exp(i - m)[..., None], log_f + (before - m)
    q, k, v = (x.transpose(1, 2).float() for x in (query, key, value))
    out, end = la.simple_gla(q, k, torch.cat([write * v, write], dim=-1), g, state=state, return_state=True)
    size = torch.maximum(out[..., -1:].abs(), torch.exp(-m)[..., None])
    h = (out[..., :-1] / (size + self.config.eps)).transpose(1, 2).to(query.dtype)
    training = "train" in (mode or self.config.mode) and c_initial is None
    wanted = self.config.return_last_states if return_last_states is None else return_last_states
    return h, (end[..., :-1], end[..., -1], m[:, -1, :, None]) if wanted or not training else None


def running_maximum(a: Tensor, b: Tensor, m: Tensor) -> Tensor:
    """m_t = max(a_t + m_{t-1}, b_t) = s_t + max(m_0, max_{j <= t} b_j - s_j), s the sums of a; (B, T, H)."""
    s = a.double().cumsum(1)
    inputs = torch.cummax(torch.cat([m[:, None].double(), b - s], dim=1), dim=1).values[:, 1:]
    return (s + inputs).to(b.dtype)
