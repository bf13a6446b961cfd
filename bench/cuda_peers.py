"""What else a CUDA user could call: FLA's Triton kernels and PyTorch's softmax attention, on the same arrays.

A peer is a pair (forward, forward + backward) of functions of one set of inputs; what is not installed is left out.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable
from typing import Any

Pair = tuple[Callable[[Any], Any], Callable[[Any], Any]]


def tensors(torch: Any, one: list[Any]) -> list[Any]:
    """CuPy arrays as PyTorch tensors over the same memory; bfloat16 goes through integers of its width."""
    found = []
    for x in one:
        if str(x.dtype) == "bfloat16":
            found.append(torch.from_dlpack(x.view("int16")).view(torch.bfloat16))
        else:
            found.append(torch.from_dlpack(x))
    return found


def simple_gla() -> dict[str, Pair]:
    """Peers of la.simple_gla by name, with versions; inputs are q, k, v, g, dout."""
    try:
        import torch
    except ImportError:
        return {}
    if not torch.cuda.is_available():
        return {}
    found = {f"torch {torch.__version__} SDPA, causal softmax: another operator": _sdpa(torch)}
    os.environ.setdefault("FLA_FLASH_KDA", "0")
    os.environ.setdefault("FLA_FLASH_QLA", "0")
    try:
        from fla.ops.simple_gla import chunk_simple_gla

        version = importlib.metadata.version("fla-core")
    except Exception:  # not installed, or not with this PyTorch
        return found
    return {f"fla-core {version} chunk_simple_gla, Triton": _fla(torch, chunk_simple_gla)} | found


def _fla(torch: Any, chunk_simple_gla: Any) -> Pair:
    def forward(one: list[Any]) -> Any:
        with torch.no_grad():
            return chunk_simple_gla(*tensors(torch, one[:4]))

    def both(one: list[Any]) -> Any:
        *inputs, dout = tensors(torch, one)
        inputs = [x.detach().requires_grad_() for x in inputs]
        out, _ = chunk_simple_gla(*inputs)
        return out, torch.autograd.grad(out, inputs, dout)

    return forward, both


def _sdpa(torch: Any) -> Pair:
    attention = torch.nn.functional.scaled_dot_product_attention

    def forward(one: list[Any]) -> Any:
        with torch.no_grad():
            return attention(*(x.transpose(1, 2) for x in tensors(torch, one[:3])), is_causal=True)

    def both(one: list[Any]) -> Any:
        *inputs, dout = tensors(torch, [*one[:3], one[4]])
        inputs = [x.detach().requires_grad_() for x in inputs]
        out = attention(*(x.transpose(1, 2) for x in inputs), is_causal=True)
        return torch.autograd.grad(out, inputs, dout.transpose(1, 2))

    return forward, both
