"""The PyTorch bridge on a GPU: host time of calls on tensors against CuPy arrays, and autograd against FLA.

    python -m bench torch_bridge --backend cuda [--json FILE]

Host time: until a call returns, few enough calls that the launch queue does not fill; a step of the gated delta rule,
its forward, and vjp with pullback. `nothing` is an operator, or an autograd function, of the same tensors that
allocates its results and does nothing else: that part is PyTorch's. GPU time: CUDA events around calls enqueued back to
back, in one run, in turn. bfloat16 with float32 gates.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

STEPS = ((1, 1, 16, 128), (32, 1, 16, 128))
FORWARD = (1, 8192, 16, 128)
TRAINED = (8, 4096, 32, 128)
QUEUE, ROUNDS = 32, 30


def draw(torch: Any, shape: tuple[int, int, int, int], seed: int = 0) -> list[Any]:
    """q, k, v, g, beta; unit keys."""
    B, T, H, D = shape
    torch.manual_seed(seed)
    q, k, v = (torch.randn(B, T, H, D, device="cuda") for _ in range(3))
    k = torch.nn.functional.normalize(k, dim=-1)
    g, beta = -0.1 * torch.rand(B, T, H, device="cuda"), torch.rand(B, T, H, device="cuda")
    return [q.bfloat16(), k.bfloat16(), v.bfloat16(), g, beta]


def host(torch: Any, calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Median host microseconds of each call, in turn."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(10):
            call()
    for _ in range(ROUNDS):
        for name, call in calls.items():
            torch.cuda.synchronize()
            began = time.perf_counter_ns()
            for _ in range(QUEUE):
                call()
            times[name].append((time.perf_counter_ns() - began) / QUEUE / 1e3)
    return {name: statistics.median(each) for name, each in times.items()}


def device(torch: Any, calls: dict[str, Callable[[], Any]], count: int = 5, rounds: int = 7) -> dict[str, float]:
    """Median GPU milliseconds of each call, in turn."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(3):
            call()
    for _ in range(rounds):
        for name, call in calls.items():
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            torch.cuda._sleep(4_000_000)  # the host runs ahead
            start.record()
            for _ in range(count):
                call()
            stop.record()
            stop.synchronize()
            times[name].append(start.elapsed_time(stop) / count)
    return {name: statistics.median(each) for name, each in times.items()}


def calls_of(la: Any, cp: Any, torch: Any, shape: tuple[int, int, int, int]) -> dict[str, dict[str, Any]]:
    """Calls by name: CuPy arrays over the memory of the tensors, and the tensors."""
    fn, mine = la.gated_delta_rule, draw(torch, shape)
    theirs = [cp.from_dlpack(x) for x in mine]
    grad = [x.clone().requires_grad_() for x in mine]
    B, T, H, D = shape
    if T == 1:
        S, cS = torch.zeros(B, H, D, D, device="cuda"), cp.zeros((B, H, D, D), dtype="float32")
        return {"in place": {"cupy": lambda: fn(*theirs, state=cS, return_state=True, overwrite_state=True),
                             "torch": lambda: fn(*mine, state=S, return_state=True, overwrite_state=True)},
                "new state": {"cupy": lambda: fn(*theirs, state=cS, return_state=True),
                              "torch": lambda: fn(*mine, state=S, return_state=True)}}  # fmt: skip
    dout, cdout = mine[2].clone(), cp.from_dlpack(mine[2].clone())
    from linattn_np.bridges.torch import operators

    assert operators.defined()
    op, other, function = torch.ops.linattn_np.gated_delta_rule, *nothing(torch)
    return {"forward": {"cupy": lambda: fn(*theirs), "torch": lambda: fn(*mine),
                        "torch.ops": lambda: op(*mine, None, None, [], None, None, "{}"),
                        "torch.ops, nothing": lambda: other(*mine, None, None, [], None, None, "{}")},
            "vjp + pullback": {"cupy": lambda: la.vjp(fn, *theirs)[1](cdout),
                               "torch": lambda: la.vjp(fn, *mine)[1](dout),
                               "torch.autograd": lambda: torch.autograd.grad(fn(*grad), grad, dout),
                               "torch.autograd, nothing": lambda: torch.autograd.grad(function(*grad), grad, dout),
                               }}  # fmt: skip


@functools.cache
def nothing(torch: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """(an operator with the schema of the gated delta rule's, an autograd function of five tensors) without kernels."""
    from linattn_np.bridges.torch import operators

    schema = str(torch.ops.linattn_np.gated_delta_rule.default._schema).partition("::gated_delta_rule")[2]
    own = torch.library.Library("linattn_bench", "DEF")
    own.define(f"nothing{schema}")
    own.impl("nothing", lambda *given: [torch.empty_like(given[2])], "CUDA")
    torch.library.register_autograd(
        "linattn_bench::nothing", lambda ctx, d: None, setup_context=operators._keep, lib=own
    )
    nothing.library = own  # type: ignore[attr-defined]  # stays registered

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *given: Any) -> Any:
            ctx.save_for_backward(*given)
            return torch.empty_like(given[2])

        @staticmethod
        def backward(ctx: Any, d: Any) -> Any:
            return tuple(torch.empty_like(x) for x in ctx.saved_tensors)

    return torch.ops.linattn_bench.nothing, Nothing.apply


def against_fla(la: Any, torch: Any) -> dict[str, Any]:
    """Forward and backward by autograd of tensors that require grad, and the largest relative difference."""
    try:
        from bench.cuda import peers

        prefix, note = peers.fla()
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except Exception as error:  # not installed, or not with this PyTorch
        return {"error": repr(error)}
    mine = [x.requires_grad_() for x in draw(torch, TRAINED)]
    dout = torch.randn_like(mine[2])
    calls = {
        "linattn_np": lambda: torch.autograd.grad(la.gated_delta_rule(*mine), mine, dout),
        f"{prefix}, {note}": lambda: torch.autograd.grad(chunk_gated_delta_rule(*mine)[0], mine, dout),
    }
    results = [call() for call in calls.values()]
    differences = [float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(*results, strict=True)]
    del results
    found = device(torch, calls)
    one, other = found.values()
    return {"ms": found, "times_ours": other / one, "difference": dict(zip(["q", "k", "v", "g", "beta"], differences,
                                                                           strict=True))}  # fmt: skip


def measure() -> dict[str, Any]:
    """All measurements."""
    import cupy as cp
    import torch

    import linattn_np as la

    found: dict[str, Any] = {"host_us": {}, "gpu_ms": {}}
    for shape in (*STEPS, FORWARD):
        for name, calls in calls_of(la, cp, torch, shape).items():
            found["host_us"][f"{name} {shape}"] = host(torch, calls)
    for name, calls in calls_of(la, cp, torch, TRAINED).items():
        found["gpu_ms"][f"{name} {TRAINED}"] = device(torch, calls)
    found["autograd_against_fla"] = {str(TRAINED): against_fla(la, torch)}
    return found


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench torch_bridge --backend cuda",
                                     description=(__doc__ or "").partition("\n")[0])  # fmt: skip
    parser.add_argument("--json", help="write the result as JSON to this file too")
    parser.add_argument("--write", action="store_true", help="write the result as JSON to bench/results/")
    args = parser.parse_args(argv)
    from bench import record

    found = measure()
    print(json.dumps(record.rounded(found), indent=1))
    if args.json:
        with open(args.json, "w") as file:
            json.dump(found, file, indent=1)
    if args.write:
        print(record.write("cuda_torch_bridge", record.rounded(found)))
    return 0
