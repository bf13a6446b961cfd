"""CPU time relative to a matrix product timed next to it, so that a busy or throttled machine cancels out."""

from __future__ import annotations

import ctypes
import os
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

SIDE = 768  # rows of the square product timed before and after each sample
SHORTEST = 5e-2  # seconds of a sample: shorter calls are repeated; after a pause or other work the first ones are slow
QUIET = 0.25  # processors that other processes may occupy for a wall time to count


class Sample(NamedTuple):
    cpu: float
    wall: float
    rate: float  # GFLOP/s of the neighbouring products, by CPU time
    foreign: float  # processors that other processes occupied meanwhile


def gemm_rate(A: np.ndarray, out: np.ndarray) -> float:
    """GFLOP/s of CPU time of one float32 product."""
    start = time.process_time()
    np.matmul(A, A, out=out)
    return 2 * SIDE**3 / (time.process_time() - start) / 1e9


def busy_seconds() -> float | None:
    """Busy and steal time of all processors since boot, in seconds."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return None
    user, nice, system, _, _, irq, soft, steal = (int(x) for x in fields[:8])
    return (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")


def sample(call: Callable[[], Any], repeats: int, A: np.ndarray, out: np.ndarray, pause: float = 0.0) -> Sample:
    """Mean of `repeats` calls, started `pause` seconds after a reference product."""
    before = gemm_rate(A, out)
    time.sleep(pause)
    busy = busy_seconds()
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(repeats):
        call()
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    foreign = 0.0 if busy is None else max(0.0, busy_seconds() - busy - cpu) / wall
    return Sample(cpu / repeats, wall / repeats, (before + gemm_rate(A, out)) / 2, foreign)


def interleaved(
    calls: Mapping[str, Callable[[], Any]], rounds: int, seconds: float = float("inf"), pause: float = 0.0
) -> dict[str, dict[str, float]]:
    """Medians over interleaved rounds, until `seconds` have passed: CPU and wall milliseconds, and reference rates.

    Each sample starts `pause` seconds after its reference product. gemm_gflop is CPU seconds times the rate of the
    neighbouring products: the operations the core could have done in that time; calls are compared by it. wall_ms is
    the median of the quiet samples, those without other load, if there are at least three; `quiet` counts them.
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
    """Calls per sample; the first call compiles and is not counted."""
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
    """Return freed memory to the system and reset the peak resident size, where supported."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    except (OSError, AttributeError):
        return


def resident(field: str) -> int:
    """VmRSS (current) or VmHWM (peak) of this process in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return 1024 * int(line.split()[1])
    raise LookupError(field)


def peak_in_child(make: Callable[[], Callable[[], Any] | None]) -> int | None:
    """Peak bytes that the call returned by `make` adds, in a forked child; None if `make` returns None."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            call = make()
            if call is not None:
                reset_peak()
                before = resident("VmRSS")
                result = call()  # alive until the peak is read
                os.write(write, str(resident("VmHWM") - before).encode())
                del result
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        found = answer.read()
    os.waitpid(child, 0)
    return int(found) if found else None
