"""Scalar decay on a GPU: forward and forward + backward, against FLA's Triton kernels where they are installed.

    python -m bench cuda_scalar [--json NAME]

Correctness first (against float64 on the same rounded inputs); then medians of CUDA-event times of calls queued one
behind the other, two sets of inputs in turn, each larger than the L2 cache. ns are per token and head.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import linattn_np as la

from . import record

SHAPES = [  # (B, T, H, K = V, dtype)
    (8, 4096, 32, 128, "bfloat16"),
    (1, 32768, 32, 128, "bfloat16"),
    (1, 131072, 8, 128, "bfloat16"),
    (1, 8192, 16, 128, "bfloat16"),
    (4, 4096, 16, 64, "bfloat16"),
    (8, 4096, 32, 128, "float16"),
    (8, 4096, 32, 128, "float32"),
]
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
QUEUED, REPEATS = 6, 7


def draw(cp: Any, B: int, T: int, H: int, D: int, dtype: str, seed: int, mixed: bool = False) -> list[Any]:
    """q, k, v, g, dout; a gate of 0.05 a token, or 0, 0.001, 0.05 and 5 side by side."""
    import ml_dtypes

    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    rng = cp.random.default_rng(seed)
    q, k, v, dout = (rng.standard_normal((B, T, H, D), dtype=np.float32).astype(kind) for _ in range(4))
    rate = cp.asarray([0.0, 0.001, 0.05, 5.0], dtype=np.float32)[cp.arange(H) % 4] if mixed else np.float32(0.05)
    return [q, k, v, -2 * rng.random((B, T, H), dtype=np.float32) * rate, dout]


def median(cp: Any, call: Callable[[Any], Any], sets: list[Any]) -> float:
    """Milliseconds of one call."""
    for one in sets:
        call(one)
    times = []
    for _ in range(REPEATS):
        start, stop = cp.cuda.Event(), cp.cuda.Event()
        start.record()
        for n in range(QUEUED):
            call(sets[n % len(sets)])
        stop.record()
        stop.synchronize()
        times.append(cp.cuda.get_elapsed_time(start, stop) / QUEUED)
    return statistics.median(times)


def forward(one: list[Any]) -> Any:
    return la.simple_gla(*one[:4], backend="cuda")


def both(one: list[Any]) -> Any:
    out, pullback = la.vjp(la.simple_gla, *one[:4], backend="cuda")
    return out, pullback(one[4])


def errors(cp: Any, dtype: str) -> dict[str, Any]:
    """Relative errors against float64, over all and of the gate's gradient in each head."""
    one = draw(cp, 2, 2047, 8, 128, dtype, seed=int(time.time()), mixed=True)
    out, grads = both(one)
    wide = [x.astype(np.float64) for x in one]
    exact, pullback = la.vjp(la.simple_gla, *wide[:4], backend="chunks")
    expected = pullback(wide[4])

    def error(a: Any, b: Any) -> float:
        return float(cp.linalg.norm(a.astype(np.float64) - b) / cp.linalg.norm(b))

    found: dict[str, Any] = {"out": error(out, exact)}
    found |= {"d" + n: error(getattr(grads, n), getattr(expected, n)) for n in ("q", "k", "v", "g")}
    return found | {"dg by head": [error(grads.g[..., h], expected.g[..., h]) for h in range(8)]}


def fla_calls() -> tuple[Callable[[Any], Any], Callable[[Any], Any], str] | None:
    """FLA's chunk_simple_gla on its Triton path: (forward, forward + backward, version)."""
    try:
        import importlib.metadata

        import torch
        from fla.ops.simple_gla import chunk_simple_gla
    except Exception as missing:
        sys.stdout.write(f"no FLA to compare with: {missing}\n")
        return None

    def there(one: list[Any]) -> list[Any]:
        kind = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}[str(one[0].dtype)]
        as_torch = lambda x, to: torch.as_tensor(x.view(np.uint8 if to.itemsize == 1 else f"i{to.itemsize}"),  # noqa: E731
                                                 device="cuda").view(to)
        q, k, v, dout = (as_torch(x, kind) for x in (*one[:3], one[4]))
        return [q, k, v, as_torch(one[3], torch.float32), dout]

    kept: dict[int, list[Any]] = {}

    def tensors(one: list[Any]) -> list[Any]:
        if id(one) not in kept:
            kept.clear() if len(kept) > 1 else None
            kept[id(one)] = there(one)
        return kept[id(one)]

    def fla_forward(one: list[Any]) -> Any:
        q, k, v, g, _ = tensors(one)
        with torch.no_grad():
            return chunk_simple_gla(q, k, v, g)

    def fla_both(one: list[Any]) -> Any:
        q, k, v, g, dout = (x.detach().requires_grad_() if n < 4 else x for n, x in enumerate(tensors(one)))
        out, _ = chunk_simple_gla(q, k, v, g)
        return torch.autograd.grad(out, (q, k, v, g), dout)

    return fla_forward, fla_both, importlib.metadata.version("fla-core")


def path(cp: Any) -> str:
    """Which passes bfloat16, K = V = 128 takes: LINATTN_CUDA_PORTABLE=1 in the environment takes the portable ones."""
    return la.explain(la.simple_gla, *draw(cp, 1, 256, 4, 128, "bfloat16", 0)[:4], backend="cuda").reason


def copy_rate(cp: Any) -> float:
    """GB/s of a device-to-device copy of 2 GiB, bytes read and written."""
    x = cp.zeros(1 << 31, dtype=np.uint8)
    y = cp.empty_like(x)
    return 2 * x.nbytes / median(cp, lambda one: cp.copyto(y, x), [None]) / 1e6


def first_call(cp: Any) -> float:
    """Seconds of the first forward and backward in this process."""
    one = draw(cp, 1, 256, 4, 128, "bfloat16", 0)
    cp.cuda.Device().synchronize()
    began = time.perf_counter()
    both(one)
    cp.cuda.Device().synchronize()
    return time.perf_counter() - began


def host_cost(call: Callable[[Any], Any], one: list[Any], calls: int = 200) -> float:
    """Microseconds that a call holds the host."""
    began = time.perf_counter()
    for _ in range(calls):
        call(one)
    return (time.perf_counter() - began) / calls * 1e6


def measure(cp: Any, result: dict[str, Any], calls: dict[str, Callable[[Any], Any]], name: str | None) -> None:
    """Times of `calls` for every shape into result["rows"], written after each shape."""
    for n, shape in enumerate(SHAPES):
        B, T, H, D, dtype = shape
        if n == len(result["rows"]):
            floor = (4 * D * BYTES[dtype] + 4) / result["copy GB/s"]  # q, k, v, out and g once
            result["rows"].append({"B": B, "T": T, "H": H, "K": D, "V": D, "dtype": dtype, "floor forward": floor})
        sets = [draw(cp, *shape, seed=seed) for seed in range(2)]
        for call in calls:
            try:
                result["rows"][n][call] = median(cp, calls[call], sets) * 1e6 / (B * T * H)
            except Exception as failed:  # a peer that does not take a shape
                result["rows"][n][call] = f"{type(failed).__name__}: {failed}"
        row = result["rows"][n].items()
        sys.stdout.write("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row) + "\n")
        sys.stdout.flush()
        del sets
        cp.get_default_memory_pool().free_all_blocks()
        if name:
            record.write(name, result)


def main(argv: list[str]) -> int:
    import cupy as cp

    parser = argparse.ArgumentParser(prog="python -m bench cuda_scalar")
    parser.add_argument("--json", metavar="NAME", help="write bench/results/NAME.json")
    parser.add_argument("--no-peer", action="store_true", help="leave FLA out")
    args = parser.parse_args(argv)
    about = cp.cuda.runtime.getDeviceProperties(0)
    result: dict[str, Any] = {
        "card": about["name"].decode(), "multiprocessors": about["multiProcessorCount"],
        "driver api": cp.cuda.runtime.driverGetVersion(), "path": path(cp),
        "first call, forward + backward, s": round(first_call(cp), 3),
        "copy GB/s": round(copy_rate(cp)), "errors": {d: errors(cp, d) for d in BYTES}, "rows": [],
    }
    small = draw(cp, 1, 64, 1, 16, "bfloat16", 0)
    forward(small), both(small)
    result["host us"] = {"forward": round(host_cost(forward, small), 1), "both": round(host_cost(both, small), 1)}
    sys.stdout.write("\n".join(f"{k}: {v}" for k, v in result.items() if k != "rows") + "\n")
    measure(cp, result, {"forward": forward, "both": both}, args.json)
    peer = None if args.no_peer else fla_calls()  # imported last: it takes long, and compiles for longer
    if peer:
        result["peer"] = f"fla-core {peer[2]}, Triton"
        measure(cp, result, {"FLA forward": peer[0], "FLA both": peer[1]}, args.json)
    return 0
