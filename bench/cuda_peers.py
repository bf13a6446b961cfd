"""What else a CUDA user could call: FLA's Triton kernels and PyTorch's softmax attention, on the same arrays.

A peer is a pair (forward, forward + backward) of functions of one set of inputs; what is not installed is left out.
"""

from __future__ import annotations

import functools
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


def of(function: str) -> dict[str, Pair]:
    """Peers of a function of cuda_simple_gla.py by name, with versions; inputs are q, k, v, g, dout, dt, A."""
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
        entries, version, note = _fla_entries(), importlib.metadata.version("fla-core"), _lift_refusal()
    except Exception:  # not installed, or not with this PyTorch
        return found
    if function == "mamba2":
        chosen = entries["simple_gla"][0]
        name = f"fla-core {version} {chosen.__name__} of dt x and dt A, which PyTorch makes, Triton{note}"
        return {name: _mamba2(torch, chosen)}
    chosen, options, arrays = entries[function]
    return {f"fla-core {version} {chosen.__name__}, Triton{note}": _fla(torch, chosen, options, arrays)} | found


def _fla_entries() -> dict[str, tuple[Any, dict[str, Any], int]]:
    """(function, options, how many of q, k, v, g it takes)."""
    from fla.ops.linear_attn import chunk_linear_attn
    from fla.ops.retention import chunk_retention
    from fla.ops.simple_gla import chunk_simple_gla

    return {"simple_gla": (chunk_simple_gla, {}, 4), "retention": (chunk_retention, {}, 3),
            "linear_attention": (chunk_linear_attn, {"normalize": False}, 3)}


def _lift_refusal() -> str:
    """FLA refuses a gated backward under Triton 3.4 to 3.7.0 on Hopper, as miscompiled; here it is compared with ours
    and then timed. Its autotuner tries every candidate, each for a shorter time than by default."""
    import triton
    from fla.ops.common import chunk_o
    from triton.backends.nvidia.driver import CudaDriver

    CudaDriver.get_benchmarker = lambda self: functools.partial(triton.testing.do_bench, warmup=3, rep=12)
    if getattr(chunk_o, "TRITON_ABOVE_3_7_1", True):
        return f" {triton.__version__}"
    chunk_o.TRITON_ABOVE_3_7_1 = True
    return f" {triton.__version__} (which its gated backward refuses: refusal lifted)"


def _fla(torch: Any, function: Any, options: dict[str, Any], arrays: int) -> Pair:
    def forward(one: list[Any]) -> Any:
        with torch.no_grad():
            return function(*tensors(torch, one[:arrays]), **options)

    def both(one: list[Any]) -> Any:
        *inputs, dout = tensors(torch, [*one[:arrays], one[4]])
        inputs = [x.detach().requires_grad_() for x in inputs]
        out, _ = function(*inputs, **options)
        return out, torch.autograd.grad(out, inputs, dout)

    return forward, both


def _mamba2(torch: Any, function: Any) -> Pair:
    def call(x: Any, dt: Any, A: Any, B: Any, C: Any) -> Any:
        return function(C, B, (dt[..., None] * x).to(x.dtype), dt * A)[0]

    def given(one: list[Any]) -> list[Any]:
        C, B, x, _, dout, dt, A = tensors(torch, one)
        return [x, dt, A, B, C, dout]

    def forward(one: list[Any]) -> Any:
        with torch.no_grad():
            return (call(*given(one)[:5]),)

    def both(one: list[Any]) -> Any:
        *inputs, dout = given(one)
        inputs = [x.detach().requires_grad_() for x in inputs]
        out = call(*inputs)
        return out, torch.autograd.grad(out, inputs, dout)

    return forward, both


def step(variant: str) -> tuple[str, Callable[[dict[str, Any], Any], Callable[[], Any]]] | None:
    """(name, what makes a call of arrays and a state) of FLA's kernel for one token, which writes a new state."""
    if variant not in ("simple_gla", "gated_delta_rule", "kda"):  # other arrays, or none
        return None
    try:
        import torch
        from fla import ops

        function = getattr(ops, f"fused_recurrent_{variant}")
        version = importlib.metadata.version("fla-core")
    except Exception:
        return None

    def made(arrays: dict[str, Any], state: Any) -> Callable[[], Any]:
        given = dict(zip(arrays, tensors(torch, list(arrays.values())), strict=True))
        S = tensors(torch, [state])[0]

        def call() -> Any:
            with torch.no_grad():
                return function(**given, initial_state=S, output_final_state=True)

        return call

    return f"fla-core {version} {function.__name__}", made


def graph_of(calls: list[Callable[[], Any]]) -> Callable[[], Any]:
    """All calls as one CUDA graph of PyTorch's: what replays it."""
    import torch

    for _ in range(2):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]
    return lambda: (graph.replay(), kept)[0]


def differences(cp: Any, theirs: tuple[Any, ...], ours: tuple[Any, ...]) -> list[float]:
    """Of a peer's results from ours, over the norm of ours."""
    found = []
    for a, b in zip(theirs, ours, strict=False):
        a, b = cp.from_dlpack(a.detach().float()), b.astype(cp.float32)
        found.append(float(cp.linalg.norm(a - b) / cp.linalg.norm(b)))
    return found


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


def gated_delta_rule() -> dict[str, Pair]:
    """Peers of la.gated_delta_rule by name, with versions; inputs are q, k, v, g, beta, dout."""
    os.environ.setdefault("FLA_FLASH_KDA", "0")
    os.environ.setdefault("FLA_FLASH_QLA", "0")
    try:
        import torch
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        version, note = importlib.metadata.version("fla-core"), _lift_refusal()
    except Exception:  # not installed, or not with this PyTorch
        return {}

    def forward(one: list[Any]) -> Any:
        with torch.no_grad():
            return chunk_gated_delta_rule(*tensors(torch, one[:5]))

    def both(one: list[Any]) -> Any:
        *inputs, dout = tensors(torch, one)
        inputs = [x.detach().requires_grad_() for x in inputs]
        out, _ = chunk_gated_delta_rule(*inputs)
        return [out, *torch.autograd.grad(out, inputs, dout)]

    return {f"fla-core {version} chunk_gated_delta_rule, Triton{note}": (forward, both)}


def peak(call: Callable[[], Any]) -> int:
    """Most bytes that PyTorch has in use at once during a call, beyond what it had before."""
    import torch

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return int(torch.cuda.max_memory_allocated() - before)
