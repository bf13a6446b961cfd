"""Other libraries on a GPU, on the same arrays: FLA's Triton kernels and PyTorch's softmax attention.

A peer is a pair (forward, forward + backward) of functions of one set of inputs; those not installed are omitted.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import os
from collections.abc import Callable
from typing import Any

Pair = tuple[Callable[[Any], Any], Callable[[Any], Any]]


def tensors(torch: Any, one: list[Any]) -> list[Any]:
    """CuPy arrays as PyTorch tensors over the same memory; bfloat16 passes through int16."""
    found = []
    for x in one:
        if str(x.dtype) == "bfloat16":
            found.append(torch.from_dlpack(x.view("int16")).view(torch.bfloat16))
        else:
            found.append(torch.from_dlpack(x))
    return found


def of(function: str) -> dict[str, Pair]:
    """Peers of a function of simple_gla.py by name and version; inputs are q, k, v, g, dout, dt, A."""
    try:
        import torch
    except ImportError:
        return {}
    if not torch.cuda.is_available():
        return {}
    found = {f"torch {torch.__version__} SDPA, causal softmax: another operator": _sdpa(torch)}
    try:
        prefix, note = fla()
        entries = _fla_entries()
    except Exception:  # not installed, or not with this PyTorch
        return found
    if function == "mamba2":
        chosen = entries["simple_gla"][0]
        name = f"{prefix} {chosen.__name__} of dt x and dt A, which PyTorch makes, {note}"
        return {name: _mamba2(torch, chosen)}
    chosen, options, arrays = entries[function]
    return {f"{prefix} {chosen.__name__}, {note}": _fla(torch, chosen, options, arrays)} | found


def _fla_entries() -> dict[str, tuple[Any, dict[str, Any], int]]:
    """(function, options, number of arrays of q, k, v, g)."""
    from fla.ops.linear_attn import chunk_linear_attn
    from fla.ops.retention import chunk_retention
    from fla.ops.simple_gla import chunk_simple_gla

    return {
        "simple_gla": (chunk_simple_gla, {}, 4),
        "retention": (chunk_retention, {}, 3),
        "linear_attention": (chunk_linear_attn, {"normalize": False}, 3),
    }


def fla() -> tuple[str, str]:
    """("fla-core VERSION", "Triton VERSION" with a note), FLA configured for these measurements.

    FLA refuses a gated backward under Triton 3.4 to 3.7.0 on Hopper, as miscompiled. The check is lifted here: its
    results are compared with ours and then timed. Its autotuner tries every candidate, each for a shorter time; with
    LINATTN_BENCH_FEW in the environment those of 4 warps and 2 or 3 stages only, if it is more than 1 at most so many.
    Every process tunes for itself.
    """
    os.environ.setdefault("FLA_FLASH_KDA", "0")
    os.environ.setdefault("FLA_FLASH_QLA", "0")
    os.environ.setdefault("FLA_CACHE_RESULTS", "0")
    import triton
    from fla.ops.common import chunk_o
    from triton.backends.nvidia.driver import CudaDriver

    CudaDriver.get_benchmarker = lambda self: functools.partial(triton.testing.do_bench, warmup=3, rep=12)
    few = int(os.environ.get("LINATTN_BENCH_FEW", 0))
    if few:
        _tune_few(triton, few if few > 1 else None)
    prefix = f"fla-core {importlib.metadata.version('fla-core')}"
    note = f"Triton {triton.__version__}" + ", few candidates" * bool(few)
    if getattr(chunk_o, "TRITON_ABOVE_3_7_1", True):
        return prefix, note
    chunk_o.TRITON_ABOVE_3_7_1 = True
    return prefix, f"{note} (which its gated backward refuses: refusal lifted)"


def _tune_few(triton: Any, most: int | None) -> None:
    """Restrict Triton's autotuner to candidates of 4 warps and 2 or 3 stages, where there are any, and to so many."""
    tuner = triton.runtime.autotuner.Autotuner
    if hasattr(tuner, "every"):
        return
    tuner.every = tuner.prune_configs

    def few(self: Any, kwargs: Any) -> list[Any]:
        found = self.every(kwargs)
        return ([c for c in found if c.num_warps == 4 and c.num_stages in (2, 3)] or found[:4])[:most]

    tuner.prune_configs = few


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
    """(name, function from arrays and a state to a call) of FLA's kernel for one token, which writes a new state."""
    if variant not in ("simple_gla", "gated_delta_rule", "kda"):  # FLA has other arrays there, or no kernel
        return None
    try:
        import torch
        from fla import ops

        function = getattr(ops, f"fused_recurrent_{variant}")
        version = importlib.metadata.version("fla-core")
    except Exception:
        return None

    def call_of(arrays: dict[str, Any], state: Any) -> Callable[[], Any]:
        given = dict(zip(arrays, tensors(torch, list(arrays.values())), strict=True))
        S = tensors(torch, [state])[0]

        def call() -> Any:
            with torch.no_grad():
                return function(**given, initial_state=S, output_final_state=True)

        return call

    return f"fla-core {version} {function.__name__}", call_of


def graph_of(calls: list[Callable[[], Any]]) -> Callable[[], Any]:
    """A function that replays all calls, captured as one PyTorch CUDA graph."""
    import torch

    for _ in range(2):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [call() for call in calls]  # alive as long as the graph
    return lambda: (graph.replay(), results)[0]


def differences(cp: Any, peer_result: tuple[Any, ...], ours: tuple[Any, ...]) -> list[float]:
    """Differences of a peer's results from ours, over the norm of ours."""
    found = []
    for a, b in zip(peer_result, ours, strict=False):
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
    """Peers of la.gated_delta_rule by name and version; inputs are q, k, v, g, beta, dout."""
    try:
        prefix, note = fla()
        import torch
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
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

    return {f"{prefix} chunk_gated_delta_rule, {note}": (forward, both)}


def vector_decay(function: str) -> dict[str, Pair]:
    """Peers of a function of vector_decay.py; inputs are its arrays in their order, dout."""
    return _fla_vector(function) | (_cudnn_kda() if function == "kda" else {})


def _fla_vector(function: str) -> dict[str, Pair]:
    """hgrn2: gla of 1 - e^g."""
    try:
        prefix, note = fla()
        import torch
        from fla import ops

        name = {"hgrn2": "gla", "rwkv7": "dplr_delta_rule", "dplr": "dplr_delta_rule"}.get(function, function)
        home = importlib.import_module("fla.ops.gdn2") if name == "gdn2" else ops
        chosen = getattr(home, f"chunk_{name}")
    except Exception:  # not installed, or not with this PyTorch
        return {}

    def call(inputs: list[Any]) -> Any:
        if function == "hgrn2":
            q, v, g = inputs
            inputs = [q, -torch.expm1(g.float()).to(v.dtype), v, g]
        if function in ("rwkv7", "dplr"):
            q, k, v, g, a, b = inputs
            inputs = [q, k, v, a, b, g]
        return chosen(*inputs, **({} if function in ("gla", "kda", "gdn2") else {"scale": 1.0}))[0]

    def forward(one: list[Any]) -> Any:
        with torch.no_grad():
            return call(tensors(torch, one[:-1]))

    def both(one: list[Any]) -> Any:
        *inputs, dout = tensors(torch, one)
        inputs = [x.detach().requires_grad_() for x in inputs]
        out = call(inputs)
        return out, torch.autograd.grad(out, inputs, dout)

    return {f"{prefix} {chosen.__name__}, {note}": (forward, both)}


def _cudnn_kda() -> dict[str, Pair]:
    """The CUDA kernels for Hopper of cuDNN's frontend. Those with gradients take log decays in float32 only."""
    try:
        import torch
        from cudnn.linear_attention.ops import kimi_delta_attention
    except Exception:  # not installed, or not with this PyTorch
        return {}

    def call(inputs: list[Any]) -> Any:
        B, T = inputs[0].shape[:2]
        offsets = torch.arange(0, (B + 1) * T, T, dtype=torch.int32, device=inputs[0].device)
        packed = (x.flatten(0, 1) for x in inputs)
        return kimi_delta_attention(*packed, offsets, plan_name="kda_hopper_cuda")[0].unflatten(0, (B, T))

    def forward(one: list[Any]) -> Any:
        with torch.no_grad():
            return call(tensors(torch, one[:-1]))

    def both(one: list[Any]) -> Any:
        *inputs, dout = tensors(torch, one)
        inputs[3] = inputs[3].float()
        inputs = [x.detach().requires_grad_() for x in inputs]
        out = call(inputs)
        return out, torch.autograd.grad(out, inputs, dout)

    name = f"cudnn-frontend {importlib.metadata.version('nvidia-cudnn-frontend')} kda_hopper_cuda"
    return {f"{name}, log decays converted to float32 for gradients": (forward, both)}


def attention(function: str) -> dict[str, Pair]:
    """Peers of a function of softmax.py; inputs are its arrays in their order, dout."""
    try:
        import torch
        from torch.nn.attention import SDPBackend
    except ImportError:
        return {}
    if function == "forgetting_attention":
        try:
            prefix, note = fla()
            from fla.ops.forgetting_attn import parallel_forgetting_attn
        except Exception:  # not installed, or not with this PyTorch
            return {}
        return {f"{prefix} parallel_forgetting_attn, {note}": _attention(torch, parallel_forgetting_attn, None)}
    if function != "softmax_attention":
        return {}
    chosen = {"FlashAttention": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
    return {f"torch {torch.__version__} SDPA by {name}": _attention(torch, _grouped(torch), backend)
            for name, backend in chosen.items()}  # fmt: skip


def _grouped(torch: Any) -> Callable[..., Any]:
    def call(q: Any, k: Any, v: Any) -> Any:
        each, grouped = [x.transpose(1, 2) for x in (q, k, v)], q.shape[2] != k.shape[2]
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(*each, is_causal=True, enable_gqa=grouped).transpose(1, 2)

    return call


def _attention(torch: Any, call: Callable[..., Any], backend: Any) -> Pair:
    """backend: that SDPA has to take."""
    from torch.nn.attention import sdpa_kernel

    def taken() -> Any:
        return contextlib.nullcontext() if backend is None else sdpa_kernel(backend)

    def forward(one: list[Any]) -> Any:
        with torch.no_grad(), taken():
            return call(*tensors(torch, one[:-1]))

    def both(one: list[Any]) -> Any:
        *inputs, dout = tensors(torch, one)
        inputs = [x.detach().requires_grad_() for x in inputs]
        with taken():
            out = call(*inputs)
            return out, *torch.autograd.grad(out, inputs, dout)

    return forward, both


def peak_bytes(call: Callable[[], Any]) -> int:
    """Peak bytes of PyTorch's allocator during a call, beyond those in use before it."""
    import torch

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return int(torch.cuda.max_memory_allocated() - before)
