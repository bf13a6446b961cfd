"""Forward, backward and both of one operator: times, shares of the limits, peers, first calls."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from bench.cuda import peers as cuda_peers
from bench.cuda import timing
from linattn_np.call.replay import plans as replay
from linattn_np.matrix_state import policy

BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "tf32": 4}  # per element
C = 64  # chunk size of the operation count
Calls = Sequence[Callable[[], Any]]
Limits = dict[str, Any]  # copy_gbs, matrix_tflops
FIRST = """
import json, time
import cupy as cp
import linattn_np as la
from bench.cuda.{module} import FUNCTION, draw_first
*arrays, dout = draw_first(cp)
cp.cuda.Device().synchronize()
began = time.perf_counter()
out, pullback = la.vjp(FUNCTION, *arrays, backend="cuda")
cp.cuda.Device().synchronize()
middle = time.perf_counter()
pullback(dout)
cp.cuda.Device().synchronize()
print(json.dumps({{"forward_s": middle - began, "backward_s": time.perf_counter() - middle}}))
"""


class Work(NamedTuple):
    """Bytes that must move and operations, per token and head."""

    bytes: float
    operations: float


def three(forward: Work, backward: Work) -> dict[str, Work]:
    """The work of forward, backward and both."""
    both = Work(forward.bytes + backward.bytes, forward.operations + backward.operations)
    return {"forward": forward, "backward": backward, "both": both}


def timed(cp: Any, calls: Calls, tokens: int) -> dict[str, float]:
    """Milliseconds of a call, and nanoseconds per token and head; tokens: B T H."""
    ms = timing.median_ms(cp, calls)
    return {"ms": ms, "ns": ms * 1e6 / tokens}


def against_limits(cp: Any, calls: Calls, tokens: int, work: Work, limits: Limits) -> dict[str, float]:
    """Times, the share of the copy rate, TFLOP/s and the share of the matrix rate."""
    row = timed(cp, calls, tokens)
    row["share_of_copy"] = work.bytes * tokens / row["ms"] / 1e6 / limits["copy_gbs"]
    row["tflops"] = work.operations * tokens / row["ms"] / 1e9
    if limits["matrix_tflops"]:
        row["share_of_matrix"] = row["tflops"] / limits["matrix_tflops"]
    return row


def limits_of(cp: Any) -> Limits:
    """The measured copy rate and matrix rate of the device."""
    return {"copy_gbs": timing.copy_gbs(cp), "matrix_tflops": timing.matrix_tflops(cp)}


@contextlib.contextmanager
def override(name: str, value: Any, owner: Any = policy) -> Iterator[None]:
    """Set a constant of policy.py, or of `la.config`, temporarily; recorded plans are discarded before and after."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    replay.clear()
    try:
        yield
    finally:
        setattr(owner, name, before)
        replay.clear()


def peer_times(
    cp: Any, pair: cuda_peers.Pair, sets: list[Any], tokens: int, rounds: int = 3
) -> Iterator[tuple[str, dict[str, Any], Callable[[], Any]]]:
    """("forward" or "both", times or the failure, a call on the first inputs) of a peer."""
    for what, call in zip(("forward", "both"), pair, strict=False):
        calls = [lambda one=one, call=call: call(one) for one in sets]
        try:
            row = timed(cp, calls * rounds, tokens)
        except Exception as error:  # a peer that does not support the case
            row = failure(error)
        yield what, row, calls[0]


def failure(error: Exception) -> dict[str, str]:
    """The row of a call that raised."""
    return {"failed": f"{type(error).__name__}: {error}"[:200]}


def first_calls(module: str) -> dict[str, dict[str, Any]]:
    """Seconds of the first forward and backward of a process: with empty caches, and with filled ones (median of 5)."""
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {"LINATTN_CACHE_DIR": f"{folder}/ours", "CUDA_CACHE_PATH": f"{folder}/theirs",
                            "CUPY_CACHE_DIR": f"{folder}/cupy"}  # fmt: skip
        command = [sys.executable, "-c", FIRST.format(module=module)]
        found = {}
        for name, count in (("empty caches", 1), ("filled caches", 5)):
            runs = [json.loads(subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout)
                    for _ in range(count)]  # fmt: skip
            found[name] = {n: statistics.median(run[n] for run in runs) for n in runs[0]}
    return found
