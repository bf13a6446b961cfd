"""The selective scan of Mamba-1 on a GPU: picoseconds a token and channel, and the share of copy of one token.

    python -m bench selective_scan --backend cuda [--results FOLDER]

bfloat16 x, dt, B, C and z, float32 A, D, dt_bias and states, N = 16. Every call has arrays of its own, which are larger
than the second cache. One token reads and writes all states: its bytes over its time, as a share of the rate at which
the device copies 4 GiB, and as many bytes.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

import linattn_np as la
from bench.cuda import report, timing

N = 16
LONG = ((8, 4096, 4096), (1, 16384, 4096), (2, 4096, 4096), (1, 2048, 2048))
TOKENS = ((256, 4096), (16, 4096))
OPTIONS = {"dt_softplus": True, "return_state": True}


def drawn(cp: Any, B: int, T: int, D: int, seed: int) -> dict[str, Any]:
    """Arrays of a layer: A = -1..-N, steps around 0.05."""
    import ml_dtypes

    rng, narrow = cp.random.default_rng(seed), ml_dtypes.bfloat16
    shapes = {"x": (B, T, D), "dt": (B, T, D), "B": (B, T, N), "C": (B, T, N), "z": (B, T, D)}
    arrays = {n: rng.standard_normal(shape, dtype=np.float32).astype(narrow) for n, shape in shapes.items()}
    return arrays | {
        "A": -cp.tile(cp.arange(1, N + 1, dtype=np.float32), (D, 1)), "D": cp.ones(D, np.float32),
        "dt_bias": cp.full(D, -3, np.float32),
    }  # fmt: skip


def long(cp: Any, B: int, T: int, D: int) -> dict[str, Any]:
    """Milliseconds of a forward, and of a forward and a backward, and picoseconds a token and channel."""
    sets = [drawn(cp, B, T, D, seed) for seed in range(2)]
    dout = sets[1]["z"]

    def both(arrays: dict[str, Any]) -> None:
        _, pullback = la.vjp(la.selective_scan, **arrays, dt_softplus=True)
        pullback(dout)

    row: dict[str, Any] = {"(B, T, D)": str((B, T, D))}
    forwards = [functools.partial(la.selective_scan, **arrays, dt_softplus=True) for arrays in sets]
    for name, calls in (("forward", forwards), ("both", [functools.partial(both, arrays) for arrays in sets])):
        ms = timing.median_ms(cp, calls * 2)
        row |= {f"{name} ms": ms, f"{name} ps": 1e9 * ms / (B * T * D)}
    return row


def token(cp: Any, B: int, D: int, copy_gbs: float) -> dict[str, Any]:
    """Microseconds of one token in a CUDA graph, whose states are overwritten, and shares of copy."""
    sets = [drawn(cp, B, 1, D, seed) for seed in range(max(4, 2**28 // (B * D * N * 4)))]
    states = [cp.ones((B, D, N), dtype=np.float32) for _ in sets]
    calls = [functools.partial(la.selective_scan, **arrays, **OPTIONS, state=S, overwrite_state=True)
             for arrays, S in zip(sets, states, strict=True)]  # fmt: skip
    moved = B * D * (2 * 4 * N + 4 * 2) + D * N * 4
    ms = timing.graph_ms(cp, calls)
    x = [cp.ones(moved // 8, dtype=np.float32) for _ in sets]
    y = [cp.empty_like(one) for one in x]
    copies = [functools.partial(cp.copyto, b, a) for a, b in zip(x, y, strict=True)]
    same = timing.graph_ms(cp, copies)
    return {"(B, D)": str((B, D)), "us": 1e3 * ms, "share of copy": moved / ms / 1e6 / copy_gbs,
            "share of a copy of these bytes": same / ms}  # fmt: skip


def main(arguments: list[str]) -> int:
    parser = report.parser("selective_scan", __doc__, peers=False)
    options = parser.parse_args(arguments)
    import cupy as cp

    copy_gbs = timing.copy_gbs(cp)
    result, rows = report.device(cp) | {"copy_gbs": copy_gbs, "N": N, "dtype": "bfloat16"}, []
    calls = [functools.partial(token, cp, *shape, copy_gbs) for shape in TOKENS]
    for call in [*(functools.partial(long, cp, *shape) for shape in LONG), *calls]:
        rows.append(call())
        print(rows[-1], flush=True)
        report.write(options.results, "cuda_selective_scan", result | {"rows": rows})
        cp.get_default_memory_pool().free_all_blocks()
    return 0
