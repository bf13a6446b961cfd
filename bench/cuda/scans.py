"""The linear recurrence on a GPU: its share of the rate at which the device copies the same bytes.

    python -m bench scans --backend cuda [--only bfloat16] [--no-peers] [--write]

h_t = a_t h_{t-1} + x_t, (B, T, D). The forward reads a and x and writes h: three arrays. The backward reads a, x and
the gradient of h, and writes those of a and x: five. Times are those of CUDA graphs over three sets of inputs, which
are larger than the second cache. Beside it stands FLA's chunk_hgrn, of log a, also with backward by its autograd.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

import linattn_np as la
from bench import record
from bench.cuda import passes, report, timing

SHAPES = ((8, 4096, 4096), (1, 65536, 4096), (1, 8192, 2048))
SETS = 3


def drawn(cp: Any, shape: tuple[int, ...], dtype: str, seed: int) -> tuple[Any, Any, Any]:
    """(a, x, the gradient of h)"""
    import ml_dtypes

    rng, kind = cp.random.default_rng(seed), ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    a = (0.9 + 0.1 * rng.random(shape, dtype=np.float32)).astype(kind)
    return a, *(rng.standard_normal(shape, dtype=np.float32).astype(kind) for _ in range(2))


def measured(cp: Any, shape: tuple[int, ...], dtype: str, copy_gbs: float, log: bool = False) -> dict[str, Any]:
    """Milliseconds, and shares of the copy rate."""
    sets = [drawn(cp, shape, dtype, seed) for seed in range(SETS)]
    if log:
        sets = [(cp.log(a.astype(np.float32)).astype(a.dtype), x, d) for a, x, d in sets]
    size = float(sets[0][0].nbytes)
    fn = functools.partial(la.scan, log=log, backend="cuda")
    row: dict[str, Any] = {"shape": list(shape), "dtype": dtype, "gate": "log a" if log else "a"}
    forwards = [functools.partial(fn, a, x) for a, x, _ in sets]
    backwards = [functools.partial(la.vjp(la.scan, a, x, log=log, backend="cuda")[1], d) for a, x, d in sets]
    for name, calls, moved in (("forward", forwards, 3), ("backward", backwards, 5)):
        ms = timing.graph_ms(cp, calls * 2)
        row |= {f"{name} ms": ms, f"{name} share": moved * size / ms / 1e6 / copy_gbs}
    row["host us"] = timing.host_us(cp, forwards[0], 60)
    return row


def peer_times(cp: Any, shape: tuple[int, ...], dtype: str) -> dict[str, Any]:
    """Milliseconds of FLA's kernels, forward and with backward, or why there are none."""
    row: dict[str, Any] = {}
    try:
        import torch
        from fla.ops.hgrn import chunk_hgrn

        own = {"bfloat16": torch.bfloat16, "float32": torch.float32}[dtype]
        make = lambda: torch.randn(shape, device="cuda", dtype=torch.float32)  # noqa: E731
        sets = [(make().to(own), (-0.1 * make().abs()).to(own)) for _ in range(2)]
        first = lambda y: y[0] if isinstance(y, tuple) else y  # noqa: E731
        with torch.no_grad():
            row["fla ms"] = timing.median_ms(cp, [functools.partial(chunk_hgrn, *one) for one in sets], 3)
        sets = [tuple(y.requires_grad_() for y in one) for one in sets]
        d = torch.ones_like(sets[0][0])

        def both(one: Any) -> None:
            torch.autograd.grad(first(chunk_hgrn(*one)), one, d)

        row["fla both ms"] = timing.median_ms(cp, [functools.partial(both, one) for one in sets], 3)
    except Exception as error:  # a peer that is not installed, or does not support the case
        row["fla"] = passes.failure(error)["failed"]
    return row


def main(arguments: list[str]) -> int:
    parser = record.parser("scans --backend cuda", __doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--no-peers", action="store_true")
    options, rows = parser.parse_args(arguments), []
    import cupy as cp

    copy_gbs = timing.copy_gbs(cp)
    print({"copy GB/s": copy_gbs}, flush=True)
    for dtype in ("bfloat16", "float32"):
        for shape in SHAPES:
            for log in (False, True):
                if options.only not in ("", dtype):
                    continue
                rows.append(measured(cp, shape, dtype, copy_gbs, log))
                cp.get_default_memory_pool().free_all_blocks()
                if log and not options.no_peers:
                    rows[-1] |= peer_times(cp, shape, dtype)
                print(record.cells(rows[-1]), flush=True)
    if options.write:
        print(report.write(record.RESULTS, "cuda_scans", report.device(cp) | {"copy_gbs": copy_gbs, "rows": rows}))
    return 0
