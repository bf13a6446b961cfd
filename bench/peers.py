"""Other implementations of the same operators on a CPU; those that are not installed are omitted."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from bench import onnx_peer
from bench.compare import Arrays, Calls

MODELS = "transformers.models"


def naive_loop(q: np.ndarray, k: np.ndarray, v: np.ndarray, g: np.ndarray, beta: np.ndarray) -> np.ndarray:
    """The gated delta rule by its definition, token by token, vectorised over heads."""
    B, T, H, D = k.shape
    S, out = np.zeros((B, H, D, v.shape[-1]), v.dtype), np.empty_like(v)
    scale = v.dtype.type(D**-0.5)
    for t in range(T):
        k_t, q_t = k[:, t, :, None, :], q[:, t, :, None, :]
        S *= np.exp(g[:, t])[..., None, None]
        S += np.swapaxes(k_t, -1, -2) * (beta[:, t, :, None, None] * (v[:, t, :, None, :] - k_t @ S))
        out[:, t] = scale * (q_t @ S)[..., 0, :]
    return out


def torch_calls(found: dict[str, Callable[..., Any]], arrays: Arrays, backward: bool) -> Calls:
    """Calls of functions of tensors: forward without autograd, or the gradients for a cotangent of ones."""
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    tensors = {name: torch.from_numpy(x) for name, x in arrays.items()}

    def forward(f: Callable[..., Any]) -> np.ndarray:
        with torch.no_grad():
            return f(**tensors).numpy()

    def both(f: Callable[..., Any]) -> Any:
        leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()}
        out = f(**leaves)
        return torch.autograd.grad(out, list(leaves.values()), torch.ones_like(out), allow_unused=True)

    call = both if backward else forward
    return {name: lambda f=f: call(f) for name, f in found.items()}


def functions(module: str, names: dict[str, str]) -> dict[str, Callable[..., Any]]:
    """Functions of a transformers module, renamed; empty where it is not installed."""
    try:
        found = importlib.import_module(f"{MODELS}.{module}")
    except ImportError:
        return {}
    return {key: getattr(found, name) for key, name in names.items() if hasattr(found, name)}


def has_torch() -> bool:
    try:
        importlib.import_module("torch")
    except ImportError:
        return False
    return True


def sdpa(**t: Any) -> Any:
    """Causal softmax attention of the same shape: another operator."""
    import torch

    heads = [t[name].transpose(1, 2) for name in "qkv"]
    return torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True)


def gated_delta_rule(arrays: Arrays, backward: bool) -> Calls:
    """onnxruntime; transformers' chunk and recurrent fallbacks, the second and a plain loop only on small shapes."""
    small = arrays["q"].size <= 2**20 and os.environ.get("OMP_NUM_THREADS", "1") == "1"
    calls: Calls = {"naive_numpy_loop": lambda: naive_loop(**arrays)} if small and not backward else {}
    calls |= {} if backward else onnx_peer.calls("gated_delta", arrays)
    if not has_torch():
        return calls
    names = {"transformers_chunk": "torch_chunk_gated_delta_rule"}
    if small and not backward:
        names["transformers_recurrent"] = "torch_recurrent_gated_delta_rule"
    modules = functions("qwen3_next.modeling_qwen3_next", names)
    found = {n: lambda q, k, v, g, beta, f=f: f(q, k, v, g=g, beta=beta)[0] for n, f in modules.items()}
    return calls | torch_calls(found | {"torch_sdpa": sdpa}, arrays, backward)


def kda(arrays: Arrays, backward: bool) -> Calls:
    """onnxruntime, transformers' chunk form of Kimi delta attention, and softmax."""
    runtime = {} if backward else onnx_peer.calls("gated_delta", arrays)
    if not has_torch():
        return runtime
    modules = functions("kimi_linear.modeling_kimi_linear", {"transformers_chunk": "chunk_kimi_delta_attention"})
    found = {n: lambda q, k, v, g, beta, f=f: f(q, k, v, g, beta)[0] for n, f in modules.items()}
    return runtime | torch_calls(found | {"torch_sdpa": sdpa}, arrays, backward)


def gla(arrays: Arrays, backward: bool) -> Calls:
    """onnxruntime, and softmax."""
    return ({} if backward else onnx_peer.calls("gated", arrays)) | softmax(arrays, backward)


def softmax(arrays: Arrays, backward: bool) -> Calls:
    """Softmax attention only: transformers has no CPU path for these variants."""
    return torch_calls({"torch_sdpa": sdpa}, arrays, backward) if has_torch() else {}


def simple_gla(arrays: Arrays, backward: bool) -> Calls:
    """onnxruntime, Mamba-2's chunk scan with A dt = g, MiniMax's attention with a constant decay, softmax."""
    runtime = {} if backward else onnx_peer.calls("gated", arrays)
    if not has_torch():
        return runtime
    found = {"torch_sdpa": sdpa}
    scan = functions("mamba2.modeling_mamba2", {"scan": "mamba2_chunk_scan"}).get("scan")
    if scan:
        import torch

        def mamba2(q: Any, k: Any, v: Any, g: Any) -> Any:
            out = scan(v / g.abs()[..., None], g.abs(), -torch.ones(q.shape[2]), k, q, 64)  # dt x is v, A dt is g
            return (out[0] if isinstance(out, tuple) else out) * q.shape[-1] ** -0.5

        found["transformers_mamba2"] = mamba2
    lightning = functions("minimax.modeling_minimax", {"layer": "MiniMaxLightningAttention"}).get("layer")
    if lightning:
        found["transformers_minimax"] = _lightning(lightning, arrays)
    return runtime | torch_calls(found, arrays, backward)


def _lightning(layer: Any, arrays: Arrays) -> Callable[..., Any]:
    """The attention of MiniMax's layer, with projections, activation, norm and gate replaced by identities."""
    import torch
    from transformers.models.minimax import MiniMaxConfig

    H, D = arrays["q"].shape[-2:]
    config = MiniMaxConfig(hidden_size=D, num_attention_heads=H, num_key_value_heads=H, head_dim=D, block_size=256)
    module = layer(config, 0)
    for name in ("qkv_proj", "act_fn", "norm", "out_proj"):
        delattr(module, name) if name in module._modules else None
        setattr(module, name, torch.nn.Identity())
    del module._modules["output_gate"]
    module.output_gate = lambda hidden: torch.tensor(float("inf"))  # its sigmoid is 1
    slope = torch.from_numpy(-arrays["g"][0, 0].copy())[:, None, None]
    module.slope_rate = slope
    module.query_decay, module.key_decay, module.diagonal_decay = module.decay_factors(slope)

    def call(q: Any, k: Any, v: Any, g: Any) -> Any:
        B, T, H, D = q.shape
        hidden = torch.cat([q, k, v], dim=-1).reshape(B, T, 3 * H * D)
        return module(hidden, (None, None), None)[0].reshape(B, T, H, D) * D**-0.5

    return call


def step(arrays: Arrays, state: np.ndarray) -> Calls:
    """One token with a state: onnxruntime, transformers' recurrent path, softmax over a KV cache of 1024 tokens."""
    runtime = onnx_peer.calls("gated_delta", arrays, state)
    if not has_torch():
        return runtime
    import torch

    S = torch.from_numpy(state)
    B, _, H, D = arrays["q"].shape
    cache = torch.randn(2, B, H, 1024, D)
    modules = functions(
        "qwen3_next.modeling_qwen3_next", {"transformers_recurrent": "torch_recurrent_gated_delta_rule"}
    )
    found = {n: lambda q, k, v, g, beta, f=f: f(q, k, v, g=g, beta=beta, initial_state=S, output_final_state=True)[0]
             for n, f in modules.items()}  # fmt: skip

    def cached(q: Any, **_: Any) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(q.transpose(1, 2), cache[0], cache[1])

    return runtime | torch_calls(found | {"torch_sdpa_1024_cached": cached}, arrays, False)
