"""One operator compared with its peers on a CPU.

    python -m bench gated_delta_rule [--threads 1,2] [--backward] [--rounds 5] [--no-memory] [--write]

Every thread count runs in its own process, because libraries read it at import. This library and its peers have a
process each, one after the other: threads of torch that wait for work occupy processors. Every memory peak is
measured in a forked child of a process that has only imported and compiled. Results are checked against float64
before timing. Single-thread runs are compared by CPU time times the rate of a matrix product timed next to each
sample, multi-thread runs by wall time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np

Arrays = dict[str, "np.ndarray"]
Calls = dict[str, Callable[[], Any]]
Draw = Callable[[tuple[int, int, int, int]], Arrays]
Peers = Callable[[Arrays, bool], Calls]
Useful = Callable[[int, bool], float | None]
THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "LINATTN_NUM_THREADS")
SECONDS = 10.0  # time budget of a shape; no round starts after it
SIDES = "ours", "theirs"  # a process each
PAUSE = 0.3  # seconds: other libraries' worker threads spin for a while after their work and occupy processors


class Case(NamedTuple):
    """A variant with its shapes (B, T, H, D), inputs, timed calls and useful operation count."""

    name: str
    shapes: list[tuple[int, int, int, int]]
    draw: Draw
    calls: Peers  # (arrays, backward); the first one is ours
    useful: Useful  # (D, backward): operations per token and head
    exact: Callable[[Arrays], Any] | None = None  # the expected result of the forward calls
    small: tuple[int, int, int, int] = (1, 128, 1, 64)  # a warm-up shape before memory is measured


def main(case: Case, arguments: list[str]) -> int:
    """Run the comparison, or one of its worker processes."""
    from bench import record

    parser = record.parser(case.name, __doc__)
    parser.add_argument("--threads", default="1,2", help="thread counts, each measured in its own process")
    parser.add_argument("--backward", action="store_true", help="measure forward + backward instead of forward")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-memory", action="store_true", help="do not measure peak memory")
    parser.add_argument("--worker", choices=[*SIDES, "peak"], help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker in SIDES:
        print(json.dumps(times(case, options.rounds, options.backward, int(options.threads), options.worker)))
        return 0
    if options.worker == "peak":
        print(json.dumps(peaks(case, options.backward)))
        return 0
    rows = []
    for threads in options.threads.split(","):
        found = [row for side in SIDES for row in _worker(case, options, side, threads)]
        more = relative([row | {"threads": int(threads)} for row in found])
        peak = {} if options.no_memory or rows else _worker(case, options, "peak", "1")
        for row in more:
            key = f"{tuple(row['shape'])} {row['name']}"
            print(line(row | ({"peak_mib": peak[key] / 2**20} if key in peak else {})), flush=True)
            row |= {"peak_mib": round(peak[key] / 2**20, 1)} if key in peak else {}
        rows += more
    if options.write:
        name = case.name + ("_backward" if options.backward else "")
        what = "forward and backward" if options.backward else "forward"
        print(record.write(name, {"what": what, "rows": summary(rows)}))
    return 0


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of one thread, and the rows of the last shape with several threads."""
    last = rows[-1]["shape"]
    return [row for row in rows if row["threads"] == 1 or row["shape"] == last]


def relative(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows by shape, with the ratio to the first one of it."""
    shapes, by = [row["shape"] for row in rows], "gemm_gflop" if rows[0]["threads"] == 1 else "wall_ms"
    base = {str(row["shape"]): row[by] for row in rows[::-1]}
    rows = sorted(rows, key=lambda row: shapes.index(row["shape"]))
    return [row | {"ratio": row[by] / base[str(row["shape"])]} for row in rows]


def line(row: dict[str, Any]) -> str:
    """One row as text."""
    text = ("(B, T, H, D) = ({}, {}, {}, {})".format(*row["shape"]) + f"  {row['threads']} thread(s)  {row['name']:24s}"
            f" cpu {row['cpu_ms']:9.2f} ms  wall {row['wall_ms']:9.2f} ms  {row['ratio']:6.2f}x")  # fmt: skip
    text += f"  {row['share']:4.0f} % of GEMM" if row["share"] is not None else 15 * " "
    return text + (f"  {row['peak_mib']:7.1f} MiB" if "peak_mib" in row else "")


def _worker(case: Case, options: argparse.Namespace, what: str, threads: str) -> Any:
    """The last line, parsed as JSON, of this program run in a process with that many BLAS and library threads."""
    command = [sys.executable, "-m", "bench", case.name, "--worker", what, "--threads", threads]
    command += ["--rounds", str(options.rounds)] + ["--backward"] * options.backward
    env = os.environ | dict.fromkeys(THREADS, threads)
    root = Path(__file__).parent.parent
    ran = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise RuntimeError(f"{' '.join(command)}:\n{ran.stderr[-3000:]}")
    return json.loads(ran.stdout.splitlines()[-1])


def times(case: Case, rounds: int, backward: bool, threads: int, side: str) -> list[dict[str, Any]]:
    """A row per shape and call; side: whose calls."""
    import numpy as np

    from bench import timing

    rows = []
    for shape in case.shapes:
        arrays = case.draw(shape)
        calls, errors = case.calls(arrays, backward), {}
        calls = {n: f for n, f in calls.items() if n.startswith("linattn_np") is (side == "ours")}
        if case.exact and not backward:
            expected = case.exact(arrays)
            for name, call in calls.items():
                if isinstance(found := call(), np.ndarray) and found.shape == expected.shape:
                    errors[name] = float(np.abs(found - expected).max() / np.abs(expected).max())
                    assert errors[name] < 1e-3, f"{name} is off by {errors[name]}"
        found = timing.interleaved(calls, rounds, SECONDS, PAUSE if threads > 1 else 0.0)
        useful, heads = case.useful(shape[-1], backward), shape[0] * shape[1] * shape[2]
        for name, row in found.items():
            share = None if useful is None else useful * heads / 1e7 / row["gemm_gflop"]
            rows.append({"shape": list(shape), "name": name, **row, "share": share, "error": errors.get(name)})
    return rows


def peaks(case: Case, backward: bool) -> dict[str, int]:
    """Peak bytes of every call beyond its inputs, results included, each in its own child process."""
    from bench import timing

    found = {}
    for call in case.calls(case.draw(case.small), backward).values():
        call()  # import and compile
    for shape in case.shapes:
        for name in case.calls(case.draw(case.small), backward):
            make = lambda shape=shape: case.calls(case.draw(shape), backward)  # noqa: E731
            taken = timing.peak_in_child(lambda name=name, make=make: make().get(name))
            found |= {} if taken is None else {f"{shape} {name}": taken}
    return found


def ours(fn: str, arrays: Arrays, backward: bool, backends: tuple[str, ...] = ("numba", "chunks")) -> Calls:
    """This library's calls by backend; those that compute them, or its definition."""
    import numpy as np

    import linattn_np as la

    function = getattr(la, fn)
    dout = np.ones_like(arrays[function.spec.change.value])

    def call(backend: str) -> Any:
        if not backward:
            return function(**arrays, backend=backend)
        out, pullback = la.vjp(function, **arrays, backend=backend)
        return out, pullback(dout)

    def computes(backend: str) -> bool:
        try:
            return bool(la.explain(function, **arrays, backend=backend))
        except ValueError:
            return False

    own = list(filter(computes, backends)) or ["reference"]
    return {f"linattn_np_{name}": lambda name=name: call(name) for name in own}


def exact(fn: str) -> Callable[[Arrays], Any]:
    """The same function in float64."""
    import numpy as np

    import linattn_np as la

    return lambda arrays: getattr(la, fn)(**{n: x.astype(np.float64) for n, x in arrays.items()}, backend="chunks")


def draw_sample(fn: str, *without: str) -> Draw:
    """float32 inputs of a variant, drawn by its spec, except the arrays named in `without`."""
    import numpy as np

    import linattn_np as la

    def draw(shape: tuple[int, int, int, int]) -> Arrays:
        B, T, H, D = shape
        arrays = la.testing.sample(getattr(la, fn), np.random.default_rng(0), B=(B,), T=T, H=H, K=D, V=D)
        return {n: x.astype(np.complex64 if x.dtype.kind == "c" else np.float32) for n, x in arrays.items()
                if n not in without}  # fmt: skip

    return draw


def delta_work(D: int, backward: bool, C: int = 32) -> float:
    """Chunk form of a delta rule, chunks of 32, lower triangles only; backward recomputes the forward pass."""
    return 6 * D * D + 4 * C * D + backward * (16 * D * D + 11 * C * D)


def plain_work(D: int, backward: bool, C: int = 32) -> float:
    """Operations of the chunk form without erase."""
    return 4 * D * D + 2 * C * D + backward * (10 * D * D + 5 * C * D)


def free_work(D: int, backward: bool, C: int = 32) -> float | None:
    """Operations of the chunk form with a free erase: two reads, two writes, a gram matrix per pair, one solve."""
    return None if backward else 8 * D * D + 8 * C * D
