"""Host time of repeated calls: the overhead of a call around its arithmetic.

    python -m bench host [--repeats 300] [--threads 1] [--tree FOLDER] [--json FILE] [--name host] [--write]

NumPy: a step of the gated delta rule with a state (1 token, (B, T, H, K) = (1, 1, 16, 128) and (32, 1, 16, 128)), and
(1, 64, 4, 64) forward and vjp + pullback, of simple_gla too. CuPy, where a device is available: the step, and forward
and vjp + pullback of (1, 8192, 16, 128); there the calls are timed until they return, not until the device has
finished. float32 on the CPU, bfloat16 with float32 gates on the GPU. Only the public interface is used, so that --tree
can name a checkout of another version of the package.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

Case = tuple[str, Callable[[], Any]]
STEPS = ((1, 1, 16, 128), (32, 1, 16, 128))
SHORT, LONG = (1, 64, 4, 64), (1, 8192, 16, 128)
WARM_UP = 20  # calls before timing: compilation, recorded plans
QUEUE = 32  # GPU calls between synchronisations, few enough that the launch queue does not fill
SECONDS = 5.0  # time budget of a case


def draw(xp: Any, shape: tuple[int, int, int, int], dtype: Any) -> dict[str, Any]:
    """q, k, v in `dtype`, unit keys; g and beta in float32."""
    import numpy as np

    B, T, H, D = shape
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, B, T, H, D)).astype(np.float32)
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    gates = {"g": -rng.uniform(0, 0.1, (B, T, H)), "beta": rng.uniform(0, 1, (B, T, H))}
    arrays = {n: xp.asarray(x).astype(dtype) for n, x in (("q", q), ("k", k), ("v", v))}
    return arrays | {n: xp.asarray(x.astype(np.float32)) for n, x in gates.items()}


def cases(xp: Any, dtype: Any, longest: tuple[int, int, int, int]) -> Iterator[Case]:
    """Named calls: steps that overwrite a state, steps that return a new one, forward, vjp + pullback."""
    import linattn_np as la

    rule = la.gated_delta_rule
    for shape in STEPS:
        B, _, H, D = shape
        arrays, state = draw(xp, shape, dtype), xp.zeros((B, H, D, D), dtype="float32")
        yield f"step {shape}, in place", lambda a=arrays, S=state: rule(
            **a, state=S, return_state=True, overwrite_state=True)  # fmt: skip
        yield f"step {shape}, new state", lambda a=arrays, S=state: rule(**a, state=S, return_state=True)
    arrays = draw(xp, longest, dtype)
    dout = xp.ones(longest, dtype="float32").astype(dtype)
    yield f"forward {longest}", lambda: rule(**arrays)
    yield f"vjp + pullback {longest}", lambda: la.vjp(rule, **arrays)[1](dout)
    scan = {n: x for n, x in arrays.items() if n != "beta"}
    yield f"simple_gla forward {longest}", lambda: la.simple_gla(**scan)
    yield f"simple_gla vjp + pullback {longest}", lambda: la.vjp(la.simple_gla, **scan)[1](dout)


def timed(call: Callable[[], Any], repeats: int, wait: Callable[[], None] = lambda: None) -> dict[str, float]:
    """Median and least microseconds of single calls; `wait` runs, untimed, before the first and after every QUEUE."""
    for _ in range(WARM_UP):
        call()
    times, began = [], time.perf_counter()
    for n in range(repeats):
        if n % QUEUE == 0:
            wait()
        start = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - start) / 1e3)
        if n >= WARM_UP and time.perf_counter() - began > SECONDS:
            break
    wait()
    return {"median_us": statistics.median(times), "least_us": min(times), "calls": len(times)}


def cupy_or_none() -> Any:
    """CuPy, if it is installed and sees a device."""
    try:
        import cupy

        return cupy if cupy.is_available() else None
    except Exception:  # not installed, or not usable
        return None


def measure(repeats: int) -> dict[str, dict[str, float]]:
    """Times by library and case."""
    import numpy as np

    found = {f"numpy {name}": timed(call, repeats) for name, call in cases(np, "float32", SHORT)}
    cp = cupy_or_none()
    if cp is not None:
        import ml_dtypes

        wait = cp.cuda.Device().synchronize
        for name, call in cases(cp, ml_dtypes.bfloat16, LONG):
            found[f"cupy {name}"] = timed(call, repeats, wait)
    return found


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench host", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=300)
    parser.add_argument("--threads", default="1", help="threads of the compiled loops and of BLAS")
    parser.add_argument("--tree", help="checkout of the package to measure; this one by default")
    parser.add_argument("--json", help="write the times as JSON to this file too")
    parser.add_argument("--name", default="host", help="with --write: name of the JSON file under bench/results/")
    parser.add_argument("--write", action="store_true", help="write the result as JSON to bench/results/")
    args = parser.parse_args(argv)
    os.environ.update(dict.fromkeys(("LINATTN_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"),
                                    args.threads))  # fmt: skip
    if args.tree:
        sys.path.insert(0, os.path.abspath(args.tree))
    import linattn_np
    from bench import record

    print(f"linattn_np {linattn_np.__version__}, {args.threads} thread(s)")
    found = measure(args.repeats)
    for name, row in found.items():
        print(f"{name:44s} median {row['median_us']:10.1f} us  least {row['least_us']:10.1f} us  {row['calls']} calls")
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"tree": os.path.dirname(linattn_np.__path__[0]), "calls": found}, file, indent=1)
    if args.write:
        print(record.write(args.name, record.rounded({"threads": int(args.threads), "calls": found})))
    return 0
