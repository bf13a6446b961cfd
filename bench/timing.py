"""CPU time beside a matrix product: seconds on a shared machine mean little, their ratio to a neighbour means more."""

from __future__ import annotations

import ctypes
import os
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

SIDE = 768  # of the square product that is timed before and after each sample
SHORTEST = 2e-3  # seconds of a sample: shorter calls are repeated
QUIET = 0.25  # processors busy with others, up to which a wall time counts


class Sample(NamedTuple):
    cpu: float
    wall: float
    rate: float  # GFLOP/s of the products beside it, by CPU time
    foreign: float  # processors that others kept busy meanwhile


def gemm_rate(A: np.ndarray, out: np.ndarray) -> float:
    """GFLOP/s of CPU time of one float32 product."""
    start = time.process_time()
    np.matmul(A, A, out=out)
    return 2 * SIDE**3 / (time.process_time() - start) / 1e9


def busy_seconds() -> float | None:
    """Seconds that all processors have been busy, or taken by the host, since the start of the system."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return None
    user, nice, system, _, _, irq, soft, steal = (int(x) for x in fields[:8])
    return (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")


def sample(call: Callable[[], Any], repeats: int, A: np.ndarray, out: np.ndarray, pause: float = 0.0) -> Sample:
    """One call, as the mean of `repeats`, `pause` seconds after the product before it."""
    before = gemm_rate(A, out)
    time.sleep(pause)
    busy = busy_seconds()
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(repeats):
        call()
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    foreign = 0.0 if busy is None else max(0.0, busy_seconds() - busy - cpu) / wall  # counted in hundredths of a second
    return Sample(cpu / repeats, wall / repeats, (before + gemm_rate(A, out)) / 2, foreign)


def interleaved(
    calls: Mapping[str, Callable[[], Any]], rounds: int, seconds: float = float("inf"), pause: float = 0.0
) -> dict[str, dict[str, float]]:
    """Medians over rounds in turn, until `seconds` have passed: CPU and wall milliseconds, and what stands beside them.

    Each sample comes `pause` seconds after the product before it.

    gemm_gflop is CPU seconds times the rate of the products beside them: what the core could have multiplied in that
    time. Ratios between calls are ratios of it. wall_ms is of the samples in which others left the machine alone,
    where there are at least three; `quiet` says how many there were.
    """
    A = np.random.default_rng(0).standard_normal((SIDE, SIDE)).astype(np.float32)
    out = np.empty_like(A)
    samples: dict[str, list[Sample]] = {name: [] for name in calls}
    repeats = {name: _repeats(call) for name, call in calls.items()}
    began = time.perf_counter()
    for n in range(rounds):
        if n >= 3 and time.perf_counter() - began > seconds:
            break
        for name, call in calls.items():
            samples[name].append(sample(call, repeats[name], A, out, pause))
    return {name: _medians(rows) for name, rows in samples.items()}


def _repeats(call: Callable[[], Any]) -> int:
    """How often a call is made for one sample; the first call compiles and is not counted."""
    call()
    start = time.perf_counter()
    call()
    return max(1, int(SHORTEST / max(time.perf_counter() - start, 1e-7)))


def _medians(rows: list[Sample]) -> dict[str, float]:
    quiet = [row for row in rows if row.foreign < QUIET]
    return {
        "cpu_ms": statistics.median(row.cpu for row in rows) * 1e3,
        "wall_ms": statistics.median(row.wall for row in (quiet if len(quiet) >= 3 else rows)) * 1e3,
        "gemm_gflops": statistics.median(row.rate for row in rows),
        "gemm_gflop": statistics.median(row.cpu * row.rate for row in rows),
        "samples": len(rows),
        "quiet": len(quiet),
    }


def reset_peak() -> None:
    """Give freed memory back and begin anew with the largest resident size, where the system can."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    except (OSError, AttributeError):
        return


def resident(field: str) -> int:
    """VmRSS (now) or VmHWM (the largest so far) of this process in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return 1024 * int(line.split()[1])
    raise LookupError(field)


def peak_in_child(make: Callable[[], Callable[[], Any] | None]) -> int | None:
    """Bytes that the call made by `make`, in a child, takes above what is there before it; None where it makes none."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            call = make()
            if call is not None:
                reset_peak()
                before = resident("VmRSS")
                kept = call()
                os.write(write, str(resident("VmHWM") - before).encode())
                del kept
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        found = answer.read()
    os.waitpid(child, 0)
    return int(found) if found else None
