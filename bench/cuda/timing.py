"""Time on a CUDA device: medians of CUDA events, graph replays, host time, and the limits of the device."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

REPEATS = 5
PAUSE = 0.05  # seconds before a sample: a GPU that has just worked hard is slower
MEMORY = 4 << 30  # bytes read by the copy whose rate is the limit


def median_ms(cp: Any, calls: Sequence[Callable[[], Any]], repeats: int = REPEATS) -> float:
    """GPU milliseconds of one of `calls`, enqueued back to back, after each has run once.

    A copy is enqueued first, so that the host runs ahead and its time is not measured.
    """
    for call in calls:
        call()
    return _timed(cp, lambda: [call() for call in calls], repeats, _head_start(cp)) / len(calls)


def eager_ms(cp: Any, calls: Sequence[Callable[[], Any]], count: int = 40, repeats: int = 3) -> float:
    """Milliseconds of a call in an eager loop that starts on an idle GPU: host time where that is longer."""
    for call in calls:
        call()
    loop = [calls[n % len(calls)] for n in range(count)]

    def run() -> None:
        for call in loop:  # results are freed at once
            call()

    return _timed(cp, run, repeats) / count


def replay_ms(cp: Any, replay: Callable[[], Any], repeats: int = REPEATS) -> float:
    """Milliseconds of a replay on the current stream directly after another replay."""
    return _timed(cp, replay, repeats, replay)


@functools.cache
def _head_start(cp: Any) -> Callable[[], None]:
    """About two milliseconds of GPU work."""
    x = cp.ones(1 << 28, dtype=np.float32)
    y = cp.empty_like(x)
    return lambda: [cp.copyto(y, x) for _ in range(4)] and None


def graph_ms(cp: Any, calls: Sequence[Callable[[], Any]], repeats: int = REPEATS) -> float:
    """Milliseconds of a call when all calls are captured in one CUDA graph; a replay directly after an untimed one."""
    for _ in range(3):
        for call in calls:
            call()
    pool, held = cp.get_default_memory_pool(), []
    pool.free_all_blocks()  # must not happen during the capture

    def hold(size: int) -> Any:
        held.append(pool.malloc(size))  # temporaries too: every replay writes to them
        return held[-1]

    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device().synchronize()
    with stream, cp.cuda.using_allocator(hold):
        stream.begin_capture()
        for call in calls:
            call()
        graph = stream.end_capture()
        graph.launch(stream)
        replay = lambda: graph.launch(stream)  # noqa: E731
        return replay_ms(cp, replay, repeats) / len(calls)


def _timed(cp: Any, run: Callable[[], Any], repeats: int, before: Callable[[], Any] | None = None) -> float:
    times = []
    for _ in range(repeats):
        start, stop = cp.cuda.Event(), cp.cuda.Event()
        cp.cuda.Device().synchronize()
        time.sleep(PAUSE)
        if before is not None:
            before()
        start.record()
        run()
        stop.record()
        stop.synchronize()
        times.append(cp.cuda.get_elapsed_time(start, stop))
    return statistics.median(times)


def host_us(cp: Any, call: Callable[[], Any], calls: int = 300) -> float:
    """Host microseconds of a call, over few enough calls that the launch queue does not fill."""
    for _ in range(5):
        call()
    times = []
    for _ in range(5):
        cp.cuda.Device().synchronize()
        began = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - began) / calls * 1e6)
    return statistics.median(times)


def copy_gbs(cp: Any, size: int = MEMORY) -> float:
    """GB/s of a device-to-device copy, counting bytes read and bytes written."""
    x = cp.ones(size // 4, dtype=np.float32)
    y = cp.empty_like(x)
    return 2 * x.nbytes / median_ms(cp, [lambda: cp.copyto(y, x)] * 3) / 1e6


def matrix_tflops(cp: Any, n: int = 8192) -> float | None:
    """TFLOP/s of a square bfloat16 matrix product in PyTorch; None without PyTorch."""
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(3):
        a @ b
    start.record()
    for _ in range(10):
        a @ b
    stop.record()
    stop.synchronize()
    return 2 * n**3 / (start.elapsed_time(stop) / 10) / 1e9


def peak_bytes(cp: Any, call: Callable[[], Any]) -> int:
    """Peak bytes of CuPy's pool during a call, beyond those in use before it."""
    pool = cp.get_default_memory_pool()
    before, used = pool.used_bytes(), [0]

    class Watch(cp.cuda.MemoryHook):
        name = "peak of the pool"

        def malloc_postprocess(self, **_: Any) -> None:
            used.append(pool.used_bytes())

    with Watch():
        call()
    return max(used) - before if len(used) > 1 else 0
