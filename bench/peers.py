"""What else a user could call for the same operator; what is not installed is left out."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np


def naive_loop(q: np.ndarray, k: np.ndarray, v: np.ndarray, g: np.ndarray, beta: np.ndarray) -> np.ndarray:
    """The gated delta rule as it is defined, a token at a time over all heads."""
    B, T, H, D = k.shape
    S, out = np.zeros((B, H, D, v.shape[-1]), v.dtype), np.empty_like(v)
    scale = v.dtype.type(D**-0.5)
    for t in range(T):
        k_t, q_t = k[:, t, :, None, :], q[:, t, :, None, :]
        S *= np.exp(g[:, t])[..., None, None]
        S += np.swapaxes(k_t, -1, -2) * (beta[:, t, :, None, None] * (v[:, t, :, None, :] - k_t @ S))
        out[:, t] = scale * (q_t @ S)[..., 0, :]
    return out


def gated_delta_rule(arrays: dict[str, np.ndarray], threads: int) -> dict[str, Callable[[], np.ndarray | None]]:
    """Calls by name. torch_sdpa is softmax attention of the same shape: another operator, its result is None."""
    calls: dict[str, Callable[[], Any]] = {"naive_numpy_loop": lambda: naive_loop(**arrays)}
    try:
        import torch
    except ImportError:
        return calls
    torch.set_num_threads(threads)
    t = {name: torch.from_numpy(x) for name, x in arrays.items()}
    heads = [t[name].transpose(1, 2).contiguous() for name in "qkv"]

    def sdpa() -> None:
        with torch.no_grad():
            torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True)

    calls["torch_sdpa"] = sdpa
    try:
        module = importlib.import_module("transformers.models.qwen3_next.modeling_qwen3_next")
    except ImportError:
        return calls

    def fallback(name: str) -> Callable[[], np.ndarray]:
        def call() -> np.ndarray:
            with torch.no_grad():
                return getattr(module, name)(t["q"], t["k"], t["v"], g=t["g"], beta=t["beta"])[0].numpy()

        return call

    calls["transformers_chunk"] = fallback("torch_chunk_gated_delta_rule")
    return calls
