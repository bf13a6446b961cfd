"""CPU time beside a matrix product: seconds on a shared machine mean little, their ratio to a neighbour means more."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

SIDE = 768  # of the square product that is timed before and after each sample


def gemm_rate(A: np.ndarray, out: np.ndarray) -> float:
    """GFLOP/s of CPU time of one float32 product."""
    start = time.process_time()
    np.matmul(A, A, out=out)
    return 2 * SIDE**3 / (time.process_time() - start) / 1e9


def interleaved(calls: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, dict[str, float]]:
    """Medians over rounds in turn: CPU and wall milliseconds, the product's rate, and GEMM-equivalent GFLOP of a call.

    gemm_gflop is CPU seconds times the rate of the products beside them: what the core could have multiplied in that
    time. Ratios between calls are ratios of it.
    """
    A = np.random.default_rng(0).standard_normal((SIDE, SIDE)).astype(np.float32)
    out = np.empty_like(A)
    samples: dict[str, list[tuple[float, float, float]]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            before = gemm_rate(A, out)
            wall, cpu = time.perf_counter(), time.process_time()
            call()
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
            samples[name].append((cpu, wall, (before + gemm_rate(A, out)) / 2))
    return {
        name: {
            "cpu_ms": statistics.median(c for c, _, _ in rows) * 1e3,
            "wall_ms": statistics.median(w for _, w, _ in rows) * 1e3,
            "gemm_gflops": statistics.median(r for _, _, r in rows),
            "gemm_gflop": statistics.median(c * r for c, _, r in rows),
        }
        for name, rows in samples.items()
    }
