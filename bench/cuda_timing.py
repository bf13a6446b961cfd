"""Time on a CUDA device: medians of CUDA events, graphs, what the host spends, the card and its ceilings."""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import re
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from linattn_np.doctor import versions

from . import record

REPEATS = 5
PAUSE = 0.05  # seconds before a sample: a card that has just worked hard is slower
MEMORY = 4 << 30  # bytes that the copy of the ceiling reads


def median_ms(cp: Any, calls: Sequence[Callable[[], Any]], repeats: int = REPEATS) -> float:
    """Milliseconds of the card for one of `calls`, queued one behind the other, after each has run once.

    A copy is queued first, so that the host is ahead and its time is not in the figure.
    """
    for call in calls:
        call()
    return _timed(cp, lambda: [call() for call in calls], repeats, _head_start(cp)) / len(calls)


def eager_ms(cp: Any, calls: Sequence[Callable[[], Any]], count: int = 40, repeats: int = 3) -> float:
    """Milliseconds of a call in a plain loop that begins with an idle card: the host's time where that is longer."""
    for call in calls:
        call()
    loop = [calls[n % len(calls)] for n in range(count)]

    def run() -> None:
        for call in loop:  # results are let go at once
            call()

    return _timed(cp, run, repeats) / count


def replay_ms(cp: Any, replay: Callable[[], Any], repeats: int = REPEATS) -> float:
    """Milliseconds of a replay on the current stream that follows another one."""
    return _timed(cp, replay, repeats, replay)


@functools.cache
def _head_start(cp: Any) -> Callable[[], None]:
    """Two milliseconds of work for the card."""
    x = cp.ones(1 << 28, dtype=np.float32)
    y = cp.empty_like(x)
    return lambda: [cp.copyto(y, x) for _ in range(4)] and None


def graph_ms(cp: Any, calls: Sequence[Callable[[], Any]], repeats: int = REPEATS) -> float:
    """The same with all calls captured into one graph that is replayed, right behind a replay that is not timed."""
    for _ in range(3):
        for call in calls:
            call()
    pool, held = cp.get_default_memory_pool(), []
    pool.free_all_blocks()  # not for want of memory during the capture

    def hold(size: int) -> Any:
        held.append(pool.malloc(size))  # what is needed on the way too: a replay writes there again
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
    """Microseconds that a call holds the host: a queue that is short enough not to fill."""
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
    """GB/s of a device-to-device copy, bytes read and written."""
    x = cp.ones(size // 4, dtype=np.float32)
    y = cp.empty_like(x)
    return 2 * x.nbytes / median_ms(cp, [lambda: cp.copyto(y, x)] * 3) / 1e6


def matrix_tflops(cp: Any, n: int = 8192) -> float | None:
    """TFLOP/s of a square product of random bfloat16 numbers in PyTorch; None without it."""
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


def card(cp: Any) -> dict[str, Any]:
    """What the measurement ran on."""
    about = cp.cuda.runtime.getDeviceProperties(0)
    driver = None
    with contextlib.suppress(OSError):
        driver = re.search(r"\d+\.\d+(\.\d+)*", Path("/proc/driver/nvidia/version").read_text())
    return {
        "date": datetime.date.today().isoformat(), "card": about["name"].decode(), "driver": driver and driver[0],
        "driver_api": cp.cuda.runtime.driverGetVersion(), "runtime": cp.cuda.runtime.runtimeGetVersion(),
        "multiprocessors": about["multiProcessorCount"], "cpu": record.cpu_model(), "versions": versions(),
    }


def write(folder: Path, name: str, result: dict[str, Any]) -> Path:
    """folder/name.json."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path


def replace(
    folder: Path, name: str, now: dict[str, Any], measured: Iterable[dict[str, Any]], case: Callable[[Any], Any],
    cases: Sequence[Any],
) -> None:
    """Write these rows in place of those of folder/name.json, each with the card and the ceilings of its run.

    case: what a row measured, as it stands in `cases`, which gives the order. Other libraries that were not measured
    again ("what: library") keep their times and errors.
    """
    told = {n: now[n] for n in ("date", "card", "driver", "copy_gbs", "matrix_tflops")}
    kept = json.loads((folder / f"{name}.json").read_text())
    kept["errors"] = _over(kept["errors"], rounded(now["errors"]))
    rows = {case(row): row for row in kept["rows"]}
    for row in measured:
        times = row["times"]
        for what, x in rows.get(case(row), {"times": {}})["times"].items():
            if ": " in what and what not in times:
                own = times[what.split(": ")[0]]["ms"]
                times[what] = x | ({"times_ours": x["ms"] / own} if "ms" in x else {})
        rows[case(row)] = rounded(row | {"measured_apart": told})
        kept["rows"] = [rows[c] for c in cases if c in rows]
        write(folder, name, kept)


def _over(old: Any, new: Any) -> Any:
    """`new`, and of dictionaries in it what only `old` has."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return new
    return {n: _over(old[n], new[n]) if n in old and n in new else (new if n in new else old)[n] for n in new | old}


def rounded(x: Any, digits: int = 4) -> Any:
    """The same with every float to `digits` digits."""
    if isinstance(x, float):
        return float(f"{x:.{digits}g}")
    if isinstance(x, dict):
        return {n: rounded(y, digits) for n, y in x.items()}
    return [rounded(y, digits) for y in x] if isinstance(x, list) else x
