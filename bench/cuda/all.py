"""Every variant on a GPU: forward, forward and backward, and the time that explain's bytes and operations predict.

    python -m bench all --backend cuda [--only NAME ...] [--cases large narrow medium small] [--seconds 300]

bfloat16; gates, strengths and parameters of a head in float32. Inputs are drawn for 64 tokens and one head in the
variant's range and repeated. ns are GPU times of a token and head, of calls enqueued back to back; `us` are those of
calls made one by one, host time where it is longer. The prediction is the larger of bytes at the rate of a copy and
operations at that of a matrix product, both measured; peak is the memory beside the inputs over their bytes. --only
leaves the rows of other variants that the file has of the same day and card.
"""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import linattn_np as la
from bench.cuda import passes, report, timing
from linattn_np.runtime.shapes import is_of_pairs
from linattn_np.sampling import draw_array, sizes_by_letter


class Case(NamedTuple):
    """Sizes of a call, K = V = D; whether its calls are made one by one."""

    B: int
    T: int
    H: int
    D: int
    one_by_one: bool = False


CASES = {"large": Case(8, 4096, 32, 128), "narrow": Case(4, 4096, 32, 64), "medium": Case(1, 8192, 16, 128),
         "small": Case(2, 1000, 8, 64, one_by_one=True)}  # fmt: skip
SIZES = {"matrix_gate": {"K": 16, "V": 16}, "based": {"K": 16}, "lact": {"M": 256}, "titans": {"M": 256},
         "atlas": {"M": 256}, "ttt_mlp": {"M": 256}}  # fmt: skip  # as published, or as fits
DRAWN = {"T": 64, "H": 1, "Hq": 1, "Hk": 1}  # sizes of the sample that is repeated
LONG = 200.0  # milliseconds of a call that is timed once


def draw(cp: Any, fn: Any, case: Case) -> dict[str, Any]:
    """The arrays of a call by name."""
    import ml_dtypes

    rng = np.random.default_rng(0)
    own = {"K": case.D, "V": case.D, "M": 64, "N": 16, "levels": math.ceil(math.log2(case.T)) + 1}
    own |= SIZES.get(fn.__name__, {})
    full = sizes_by_letter(T=case.T, H=case.H, **own) | {"D": case.H * case.D}
    found = {}
    for name, arg in fn.spec.arrays.items():
        axes = arg.axes.split("|")[0].split()
        if arg.reinterprets or is_of_pairs(" ".join(axes)):
            continue
        lead = ["B"] if axes[0] == "T" else []
        sizes = full | {"B": case.B}
        few = tuple((sizes | DRAWN | {"B": 1})[n] for n in lead + axes)
        wide = axes[0] == "T" and axes != ["T", "H"]
        x = draw_array(fn, name, rng, few)
        x = x.astype(ml_dtypes.bfloat16 if wide and x.dtype.kind == "f" else np.float32 if x.dtype.kind == "f" else "F")
        shape = tuple(sizes[n] for n in lead + axes)
        raw = cp.asarray(x.view(np.int16) if wide and x.dtype.itemsize == 2 else x)
        raw = cp.tile(raw, tuple(-(-m // n) for m, n in zip(shape, few, strict=True)))
        raw = cp.ascontiguousarray(raw[tuple(slice(0, m) for m in shape)])
        found[name] = raw.view(ml_dtypes.bfloat16) if raw.dtype == np.int16 else raw
    return found


def calls_of(fn: Any, arrays: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """Forward, and forward with backward."""
    options = fn.samples.options[0]

    def both() -> Any:
        out, pullback = la.vjp(fn, **arrays, **options)
        return pullback(out)

    return {"forward": lambda: fn(**arrays, **options), "both": both}


def once(cp: Any, call: Callable[[], Any]) -> float:
    """Milliseconds of one call."""
    start, stop = cp.cuda.Event(), cp.cuda.Event()
    start.record()
    call()
    stop.record()
    stop.synchronize()
    return cp.cuda.get_elapsed_time(start, stop)


def measure(cp: Any, fn: Any, case: Case, limits: passes.Limits) -> dict[str, Any]:
    """Times of one variant and case."""
    arrays, tokens = draw(cp, fn, case), case.B * case.T * case.H
    explained = la.explain(fn, **arrays, **fn.samples.options[0])
    given = sum(x.nbytes for x in arrays.values())
    floor = explained.bytes / limits["copy_gbs"] / 1e6
    if limits["matrix_tflops"]:
        floor = max(floor, explained.operations / limits["matrix_tflops"] / 1e9)
    row: dict[str, Any] = {"backend": explained.backend, "predicted_ns": floor * 1e6 / tokens}
    for name, call in calls_of(fn, arrays).items():
        try:
            call()
            ms = once(cp, call)
            if case.one_by_one:
                row[f"{name}_us"] = 1e3 * (ms if ms > LONG else timing.eager_ms(cp, [call], 20, 3))
            else:
                row[f"{name}_ns"] = 1e6 / tokens * (ms if ms > LONG else timing.median_ms(cp, [call] * 3, 3))
            row[f"{name}_peak"] = timing.peak_bytes(cp, call) / given
        except Exception as error:  # the table goes on
            row[f"{name}_failed"] = passes.failure(error)["failed"]
        cp.get_default_memory_pool().free_all_blocks()
    if explained.slow:
        row["slow"] = explained.slow[:120]
    return row


def compile_all(names: list[str], cases: list[str], seconds: float) -> None:
    """Fill the cache of compiled kernels by processes of their own, some at a time."""

    def run(name: str) -> None:
        command = [sys.executable, "-m", "bench.cuda.all", name, *cases]
        try:
            subprocess.run(command, capture_output=True, timeout=seconds, check=False)
        except subprocess.TimeoutExpired:
            sys.stderr.write(f"{name}: not compiled within {seconds:.0f} s\n")

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(run, names))


def compile_one(name: str, cases: list[str]) -> None:
    """Make the calls of a variant once."""
    import cupy as cp

    fn = getattr(la, name)
    for case in cases:
        for call in calls_of(fn, draw(cp, fn, CASES[case])).values():
            call()


def rows(cp: Any, names: list[str], cases: list[str], limits: Any, seconds: float) -> Iterator[dict[str, Any]]:
    """A row a variant."""
    end = time.monotonic() + seconds
    for name in names:
        if time.monotonic() > end:
            sys.stderr.write(f"{name}: no time is left\n")
            continue
        row = {"function": name}
        for case in cases:
            row[case] = measure(cp, getattr(la, name), CASES[case], limits)
            shown = {n: x for n, x in row[case].items() if n != "slow"}
            sys.stdout.write(f"{name:28s} {case:7s} {report.record.cells(shown)}\n")
            sys.stdout.flush()
        yield row


def others(folder: Path, now: dict[str, Any], names: list[str]) -> list[dict[str, Any]]:
    """The rows of other variants in the file, if it is of the same day and card."""
    path = folder / "cuda_all.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    same = all(known.get(n) == now[n] for n in ("date", "gpu", "driver"))
    return [row for row in known["rows"] if row["function"] not in names] if same else []


def main(argv: list[str]) -> int:
    parser = report.parser("all", __doc__, peers=False)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="variants; all by default")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--seconds", type=float, default=600.0, help="after which no further variant is begun")
    args = parser.parse_args(argv)
    import cupy as cp

    names = args.only or [fn.__name__ for fn in la.VARIANTS]
    began = time.monotonic()
    compile_all(names, args.cases, args.seconds / 2)
    sys.stdout.write(f"compiled in {time.monotonic() - began:.0f} s\n")
    limits = passes.limits_of(cp)
    left = args.seconds - (time.monotonic() - began)
    result = report.device(cp) | limits
    before = others(args.results, result, names) if args.only else []
    found = itertools.chain(before, rows(cp, names, args.cases, limits, left))
    report.write_each(args.results, "cuda_all", result, found)
    return 0


if __name__ == "__main__":
    compile_one(sys.argv[1], sys.argv[2:])
