"""Simple GLA on a GPU: forward, backward and both, beside the card's ceilings and other libraries.

    python -m bench simple_gla --backend cuda [--results FOLDER] [--no-peers] [--cases N ...]

Correctness first, against float64 on the same rounded inputs. `ms` is the card's time of a call in a full queue, inputs
taken in turn, `eager_ms` that of a plain loop, `graph_ms` of a replay; ns are per token and head, of `ms`. The floor is
each array read or written once at the measured copy rate; operations are those of the chunk form with chunks of 64.
`passes`: wgmma, or portable ones, which are forced on the same card. Retention and linear attention: no gate gradient.
Mamba-2: dt and A, without skip and gate.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import linattn_np as la
from bench import cuda_peers, record
from bench import cuda_timing as timing
from linattn_np import again
from linattn_np.cores.matrix_state import cuda_wgmma

CASES = [  # (function, B, T, H, K = V, dtype, portable passes forced)
    ("simple_gla", 8, 4096, 32, 128, "bfloat16", False),
    ("simple_gla", 1, 32768, 32, 128, "bfloat16", False),
    ("simple_gla", 1, 131072, 8, 128, "bfloat16", False),
    ("simple_gla", 1, 8192, 16, 128, "bfloat16", False),
    ("simple_gla", 4, 4096, 16, 64, "bfloat16", False),
    ("retention", 8, 4096, 32, 128, "bfloat16", False),
    ("linear_attention", 8, 4096, 32, 128, "bfloat16", False),
    ("mamba2", 8, 4096, 32, 128, "bfloat16", False),
    ("simple_gla", 8, 4096, 32, 128, "bfloat16", True),
    ("simple_gla", 1, 32768, 32, 128, "bfloat16", True),
    ("simple_gla", 8, 4096, 32, 128, "float16", False),
    ("simple_gla", 8, 4096, 32, 128, "float32", False),
    ("simple_gla", 8, 4096, 32, 128, "tf32", False),  # float32 with precision="tf32"
]
LONGEST_SOFTMAX = 32768  # tokens up to which softmax attention is timed too
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "tf32": 4}
BOUND = {"bfloat16": 4e-3, "float16": 8e-4, "float32": 4e-6, "tf32": 8e-4}
C = 64  # of the operations that are counted
FIRST = """
import json, sys, time
import cupy as cp, numpy as np
import linattn_np as la
from bench.cuda_simple_gla import draw
one = draw(cp, 1, 4096, 8, 128, "bfloat16", 0)
cp.cuda.Device().synchronize()
began = time.perf_counter()
out, pullback = la.vjp(la.simple_gla, *one[:4], backend="cuda")
cp.cuda.Device().synchronize()
middle = time.perf_counter()
pullback(one[4])
cp.cuda.Device().synchronize()
print(json.dumps({"forward_s": middle - began, "backward_s": time.perf_counter() - middle}))
"""


def draw(cp: Any, B: int, T: int, H: int, D: int, dtype: str, seed: int, mixed: bool = False) -> list[Any]:
    """q, k, v, g, dout; a gate of 0.05 a token, or 0, 0.001, 0.05, 5 and resets side by side.

    Without the latter, dt and A of Mamba-2 too, whose products are the gates.
    """
    import ml_dtypes

    kind = {"bfloat16": ml_dtypes.bfloat16, "tf32": "float32"}.get(dtype, dtype)
    rng = cp.random.default_rng(seed)
    q, k, v, dout = (rng.standard_normal((B, T, H, D), dtype=np.float32).astype(kind) for _ in range(4))
    u = 2 * rng.random((B, T, H), dtype=np.float32)
    if not mixed:
        A = cp.full(H, -0.05, dtype=np.float32)
        return [q, k, v, A * u, dout, u, A]
    rate = cp.asarray([0.0, 0.001, 0.05, 5.0, 0.1], dtype=np.float32)[cp.arange(H) % 5]
    resets = (cp.arange(H) % 5 == 4) & (u < 0.1)
    return [q, k, v, cp.where(resets, np.float32(-np.inf), -rate * u), dout]


def precision_of(dtype: str) -> str | None:
    return "tf32" if dtype == "tf32" else None


def arrays_of(function: str, one: list[Any]) -> list[Any]:
    q, k, v, g, *_ = one
    if function == "mamba2":
        return [v, *one[5:], k, q]
    return [q, k, v, g] if function == "simple_gla" else [q, k, v]


def options_of(one: list[Any], precision: str | None) -> dict[str, Any]:
    return {"scale": one[0].shape[-1] ** -0.5, "backend": "cuda", "precision": precision}


def forward(one: list[Any], function: str = "simple_gla", precision: str | None = None) -> Any:
    return getattr(la, function)(*arrays_of(function, one), **options_of(one, precision))


def pullback_of(one: list[Any], function: str = "simple_gla", precision: str | None = None) -> tuple[Any, Any]:
    return la.vjp(getattr(la, function), *arrays_of(function, one), **options_of(one, precision))


def both(one: list[Any], function: str = "simple_gla", precision: str | None = None) -> Any:
    out, pullback = pullback_of(one, function, precision)
    return out, pullback(one[4])


def errors(cp: Any, dtype: str) -> dict[str, Any]:
    """Relative errors against float64, over all and of the gate's gradient in each head."""
    one = draw(cp, 2, 2047, 10, 128, dtype, seed=int.from_bytes(os.urandom(4), "little"), mixed=True)
    out, grads = both(one, precision=precision_of(dtype))
    wide = [x.astype(np.float64) for x in one]
    exact, pullback = la.vjp(la.simple_gla, *wide[:4], backend="chunks")
    expected = pullback(wide[4])

    def error(a: Any, b: Any) -> float:
        return float(cp.linalg.norm(a.astype(np.float64) - b) / cp.linalg.norm(b))

    found: dict[str, Any] = {"out": error(out, exact)}
    found |= {"d" + n: error(getattr(grads, n), getattr(expected, n)) for n in ("q", "k", "v", "g")}
    return found | {"dg by head": [error(grads.g[..., h], expected.g[..., h]) for h in range(10)]}


def floors(D: int, size: int, gate: bool) -> dict[str, tuple[float, float]]:
    """Bytes and operations of a token and head: forward, backward, both; gate: with a gradient of its own."""
    ahead = (4 * D * size + 4 * gate, 2 * C * D * 2 + 4 * D * D)
    back = (7 * D * size + 8 * gate, 8 * C * D * 2 + 8 * D * D)
    return {"forward": ahead, "backward": back, "both": (ahead[0] + back[0], ahead[1] + back[1])}


def peak(cp: Any, call: Callable[[], Any]) -> int:
    """Most bytes in use at once during a call, beyond what was in use before it."""
    pool = cp.get_default_memory_pool()
    before, seen = pool.used_bytes(), [0]

    class Watch(cp.cuda.MemoryHook):
        name = "the most that is in use"

        def malloc_postprocess(self, **_: Any) -> None:
            seen.append(pool.used_bytes())

    with Watch():
        call()
    return max(seen) - before if len(seen) > 1 else 0


@contextlib.contextmanager
def forced(portable: bool) -> Iterator[None]:
    """The portable passes, where asked for."""
    before, cuda_wgmma.PORTABLE = cuda_wgmma.PORTABLE, portable
    again.forget()
    try:
        yield
    finally:
        cuda_wgmma.PORTABLE = before
        again.forget()


def ours(cp: Any, case: tuple[Any, ...], ceilings: dict[str, Any], sets: list[list[Any]]) -> dict[str, Any]:
    function, B, T, H, D, dtype, _ = case
    th, precision = B * T * H, precision_of(dtype)
    pulls = [pullback_of(one, function, precision)[1] for one in sets]
    calls = {
        "forward": [lambda one=one: forward(one, function, precision) for one in sets],
        "backward": [lambda pull=pull, one=one: pull(one[4]) for pull, one in zip(pulls, sets, strict=True)],
        "both": [lambda one=one: both(one, function, precision) for one in sets],
    }
    row: dict[str, Any] = {}
    for name, each in calls.items():
        ms = timing.median_ms(cp, each * 3)
        moved, operations = floors(D, BYTES[dtype], function in ("simple_gla", "mamba2"))[name]
        row[name] = {"ms": ms, "ns": ms * 1e6 / th, "share_of_copy": moved * th / ms / 1e6 / ceilings["copy_gbs"],
                     "tflops": operations * th / ms / 1e9}
        if ceilings["matrix_tflops"]:
            row[name]["share_of_matrix"] = row[name]["tflops"] / ceilings["matrix_tflops"]
    for name in ("forward", "both"):
        row[name] |= {"eager_ms": timing.eager_ms(cp, calls[name]), "graph_ms": timing.graph_ms(cp, calls[name]),
                      "peak_bytes": peak(cp, calls[name][0])}
    return row


def first_calls() -> dict[str, dict[str, float]]:
    """Seconds of the first forward and backward of a fresh process: empty caches, then filled ones (median of five)."""
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {"LINATTN_CACHE_DIR": f"{folder}/ours", "CUDA_CACHE_PATH": f"{folder}/theirs",
                            "CUPY_CACHE_DIR": f"{folder}/cupy"}
        found = {}
        for name, count in (("empty caches", 1), ("filled caches", 5)):
            each = [json.loads(subprocess.run([sys.executable, "-c", FIRST], env=env, capture_output=True, text=True,
                                              check=True).stdout) for _ in range(count)]  # fmt: skip
            found[name] = {n: statistics.median(x[n] for x in each) for n in each[0]}
    return found


def _show(row: dict[str, Any]) -> None:
    head = " ".join(str(row[n]) for n in ("function", "B", "T", "H", "K", "dtype", "passes"))
    for name, x in row["times"].items():
        cells = "  ".join(f"{n} {y:.4g}" if isinstance(y, float) else f"{n} {y}" for n, y in x.items())
        sys.stdout.write(f"{head} {name:10s} {cells}\n")
    sys.stdout.flush()


def theirs(
    cp: Any, case: tuple[Any, ...], sets: list[list[Any]], times: dict[str, Any], peers: dict[str, cuda_peers.Pair]
) -> dict[str, Any]:
    """Times of the peers that take a case, how many times ours they are, and how far their results are from ours."""
    function, B, T, H, _, dtype, _ = case
    found: dict[str, Any] = {}
    for name, pair in peers.items():
        softmax = "SDPA" in name
        if softmax and (T > LONGEST_SOFTMAX or dtype != "bfloat16"):
            continue
        for what, call in zip(("forward", "both")[: 1 + (dtype == "bfloat16")], pair, strict=False):
            calls = [lambda one=one, call=call: call(one) for one in sets]
            try:
                row = {"ms": timing.median_ms(cp, calls * (1 if softmax else 3))}
                row |= {} if softmax else {"eager_ms": timing.eager_ms(cp, calls)}
            except Exception as failed:  # a peer that does not take a shape
                found[f"{what}: {name}"] = {"failed": f"{type(failed).__name__}: {failed}"[:200]}
                continue
            row |= {"ns": row["ms"] * 1e6 / (B * T * H), "times_ours": row["ms"] / times[what]["ms"]}
            if not softmax:
                row["differences"] = differences(cp, what, call(sets[0]), sets[0], function)
            found[f"{what}: {name}"] = row
    return found


def differences(cp: Any, what: str, theirs: Any, one: list[Any], function: str) -> list[float]:
    """Of a peer's out, or out and gradients, from ours."""
    if what == "forward":
        return cuda_peers.differences(cp, theirs[:1], (forward(one, function),))
    out, grads = both(one, function)
    return cuda_peers.differences(cp, (theirs[0], *theirs[1]), (out, *grads))


def measure(cp: Any, ceilings: dict[str, Any], peers: bool, cases: list[Any]) -> Iterator[dict[str, Any]]:
    """A row a case."""
    for case in cases:
        function, B, T, H, D, dtype, portable = case
        sets = [draw(cp, B, T, H, D, dtype, seed=seed) for seed in range(2)]
        with forced(portable):
            reason = la.explain(getattr(la, function), *arrays_of(function, sets[0])).reason
            row = {"function": function, "B": B, "T": T, "H": H, "K": D, "V": D, "dtype": dtype, "forced": portable,
                   "passes": "wgmma" if "wgmma" in reason else "mma.sync", "times": ours(cp, case, ceilings, sets)}
        if peers and not portable and dtype != "float16":
            row["times"] |= theirs(cp, case, sets, row["times"], cuda_peers.of(function))
        _show(row)
        yield row
        del sets
        cp.get_default_memory_pool().free_all_blocks()


def case_of(row: dict[str, Any]) -> tuple[Any, ...]:
    return (*(row[n] for n in ("function", "B", "T", "H", "K", "dtype")), row["forced"])


def main(argv: list[str]) -> int:
    prog = "python -m bench simple_gla --backend cuda"
    parser = argparse.ArgumentParser(prog=prog, description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=record.RESULTS, help="folder of the JSON file")
    parser.add_argument("--no-peers", action="store_true", help="leave other libraries out")
    parser.add_argument("--cases", type=int, nargs="+", help="these alone, in place of their rows in the file")
    args = parser.parse_args(argv)
    import cupy as cp

    found = {dtype: errors(cp, dtype) for dtype in BYTES}
    with forced(portable=True):
        found["bfloat16, portable"] = errors(cp, "bfloat16")
    wrong = {d: e for d, e in found.items() if max(e[n] for n in ("out", "dq", "dk", "dv")) > BOUND[d.split(",")[0]]}
    if wrong:
        sys.stderr.write(f"wrong: {wrong}\n")
        return 1
    ceilings = {"copy_gbs": timing.copy_gbs(cp), "matrix_tflops": timing.matrix_tflops(cp)}
    result = timing.card(cp) | ceilings | {"errors": found}
    if args.cases is not None:
        rows = measure(cp, ceilings, not args.no_peers, [CASES[n] for n in args.cases])
        timing.replace(args.results, "cuda_simple_gla", result, rows, case_of, CASES)
        return 0
    result["first_call"] = first_calls()
    sys.stdout.write("\n".join(f"{n}: {x}" for n, x in result.items() if n != "errors") + "\n")
    result["rows"] = rows = []
    for row in measure(cp, ceilings, not args.no_peers, CASES):
        rows.append(row)
        path = timing.write(args.results, "cuda_simple_gla", timing.rounded(result))  # what there is, after each shape
    sys.stdout.write(f"{path}\n")
    return 0
