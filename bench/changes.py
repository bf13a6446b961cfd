"""A repeated call with a change of variables over the same call with ready inputs, one token with a state.

    python -m bench changes [--repeats 400] [--threads 1] [--cupy] [--only REGEX] [--json FILE]

Each row (change_rows.py): a variant, or an option that preprocesses its inputs, and the cells of the core that it
becomes, on inputs computed before; of mesa_net, which is a cell itself, also its systems solved by the array library.
Calls: forward with a new state and with overwrite_state, la.step, and vjp + pullback. Both calls are timed alternately
in one process; the ratio is that of the times that a tenth of the calls fell below.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from .record import machine

SHAPES = ((1, 4, 64), (1, 16, 64), (1, 16, 128))  # (B, H, K = V)
WARM_UP = 15
TARGET = 1.5  # the ratio that one token may cost
QUEUE = 32  # GPU calls between synchronisations


def call_of(kind: str, name: str, given: dict[str, Any], state: Any) -> Callable[[], Any]:
    """The call that is timed."""
    import linattn_np as la

    fn, more = getattr(la, name), {"state": state, "return_state": True}
    if kind == "in place":
        return lambda: fn(**given, **more, overwrite_state=True)
    if kind == "step":
        tokens = {n: x[:, 0] if hasattr(x, "ndim") and x.ndim >= 3 else x for n, x in given.items()}
        names, options = list(fn.spec.arrays), {n: x for n, x in tokens.items() if n not in fn.spec.arrays}
        arrays = {n: tokens[n] for n in names if n in tokens}
        return lambda: la.step(fn, **arrays, **options, **more)
    if kind == "vjp":
        out = fn(**given)
        return lambda: la.vjp(fn, **given, **more)[1](out)
    return lambda: fn(**given, **more)


def timed(calls: list[Callable[[], Any]], repeats: int, wait: Callable[[], None]) -> list[float]:
    """For each call the microseconds that a tenth of its repeats fell below; the calls take turns."""
    for call in calls:
        for _ in range(WARM_UP):
            call()
    times: list[list[int]] = [[] for _ in calls]
    for n in range(repeats):
        if n % QUEUE == 0:
            wait()
        for call, own in zip(calls, times, strict=True):
            start = time.perf_counter_ns()
            call()
            own.append(time.perf_counter_ns() - start)
    wait()
    return [float(np.percentile(own, 10)) / 1e3 for own in times]


def on(xp: Any, dtype: Any, given: dict[str, Any]) -> dict[str, Any]:
    """The arrays of a call in a library."""
    wide = ("g", "beta", "A_log", "dt_bias", "A", "D", "dt", "i", "f", "s", "gv")
    move = lambda n, x: xp.asarray(x).astype(x.dtype if n in wide else dtype)  # noqa: E731
    return {n: move(n, x) if isinstance(x, np.ndarray) else x for n, x in given.items()}


def measure(args: argparse.Namespace, xp: Any, dtype: Any, wait: Callable[[], None]) -> dict[str, Any]:
    """By case: (microseconds changed, ready, whether it is a change of variables)."""
    import linattn_np as la

    from .change_rows import library_solver, pairs

    found: dict[str, Any] = {}
    for shape in [SHAPES[n] for n in args.shapes]:
        for pair in pairs(*shape):
            if args.only and not re.search(args.only, pair.name):
                continue
            for kind in args.kinds:
                calls = []
                for name, given in (pair.changed, *pair.ready):
                    moved = on(xp, dtype, given)
                    state = getattr(la, name)(**moved, return_state=True)[1]
                    calls.append(call_of(kind, name, moved, state))
                    if pair.is_solved and len(calls) == 1:
                        solve = library_solver(xp, (name, moved), state, 2 if kind == "vjp" else 1)
                calls += [solve] if pair.is_solved else []
                try:
                    changed, *ready = timed(calls, args.repeats, wait)
                except Exception as error:  # the table goes on
                    print(f"{pair.name} {kind}: {type(error).__name__}: {error}")
                    continue
                found[f"{pair.name}, {shape}, {kind}"] = (changed, sum(ready), pair.is_change)
                print(
                    f"{pair.name:42s} {shape!s:14s} {kind:9s} {changed:8.1f} us {sum(ready):8.1f} us "
                    f"{changed / sum(ready):6.2f}",
                    flush=True,
                )
    return found


def summary(found: dict[str, Any]) -> list[dict[str, Any]]:
    """With the largest state, a row of every function's first pair and of its pair with the largest ratio."""
    rows: dict[str, dict[str, Any]] = {}
    for call, (changed, ready, _) in found.items():
        name, shape, kind = re.fullmatch(r"(.*), (\(.*?\)), (.*)", call).groups()  # type: ignore[union-attr]
        if shape == str(SHAPES[-1]):
            rows.setdefault(name, {"call": name})[kind] = {"changed": changed, "ready": ready, "ratio": changed / ready}
    by_function: dict[str, list[str]] = {}
    for name in rows:
        by_function.setdefault(name.split()[0], []).append(name)
    worst = lambda name: max(x["ratio"] for x in rows[name].values() if isinstance(x, dict))  # noqa: E731
    kept = {n for names in by_function.values() for n in (names[0], max(names, key=worst))}
    return [row for name, row in rows.items() if name in kept]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench changes", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=400)
    parser.add_argument("--threads", default="1", help="threads of the compiled loops and of BLAS")
    parser.add_argument("--cupy", action="store_true", help="on CuPy arrays: bfloat16 with float32 gates")
    parser.add_argument("--only", help="names of the rows, a regular expression")
    parser.add_argument("--kinds", nargs="+", default=["new", "in place", "step", "vjp"])
    parser.add_argument("--shapes", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--json", help="write the times to this file too")
    parser.add_argument("--write", action="store_true", help="write the result as JSON to bench/results/")
    args = parser.parse_args(argv)
    names = ("LINATTN_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    os.environ.update(dict.fromkeys(names, args.threads))
    if args.cupy:
        import cupy
        import ml_dtypes

        from .cuda.report import device

        where = device(cupy)
        found = measure(args, cupy, ml_dtypes.bfloat16, cupy.cuda.Device().synchronize)
    else:
        where = machine()
        found = measure(args, np, np.float32, lambda: None)
    for is_change, what in ((True, "changes of variables"), (False, "solvers: no change of variables")):
        ratios = {name: changed / ready for name, (changed, ready, is_one) in found.items() if is_one is is_change}
        if worst := max(ratios, key=ratios.__getitem__, default=""):
            above = sum(ratio > TARGET for ratio in ratios.values())
            print(f"{len(ratios)} pairs of {what}, {above} above {TARGET}, largest ratio {ratios[worst]:.2f}: {worst}")
    if args.json:
        with open(args.json, "w") as file:
            json.dump(where | {"microseconds": found}, file, indent=1)
    if args.write:
        from .record import rounded, write

        about = {"unit": "microseconds", "dtype": "bfloat16" if args.cupy else "float32", "(B, H, K = V)": SHAPES[-1]}
        name = "changes_cupy" if args.cupy else "changes"
        print(write(name, where | about | {"rows": rounded(summary(found))}))
    return 0
