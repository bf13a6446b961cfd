"""The gated delta rule on a GPU: forward, backward and both, beside the card's ceilings and FLA's Triton kernels.

    python -m bench gated_delta_rule --backend cuda [--results FOLDER] [--no-peers] [--cases N ...]

Correctness first, against float64 on the same rounded inputs, FLA beside it. Times are medians of CUDA events around
calls queued one behind the other, inputs taken in turn; ns are per token and value head. The floor is each array read
or written once at the measured copy rate; operations are those of the chunk form with chunks of 64. Beside the paths
taken unasked: blocks made again in the backward, and the portable kernels.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import linattn_np as la
from bench import cuda_peers, record
from bench import cuda_timing as timing
from bench.cuda_simple_gla import peak
from linattn_np import again
from linattn_np.cores.matrix_state import cuda_delta_plan, cuda_wgmma

SHAPES = [  # (B, T, heads of q and k, heads of v, K = V, dtype); FLA compiles and tunes anew for other numbers of heads
    (8, 4096, 32, 32, 128, "bfloat16"),
    (1, 32768, 32, 32, 128, "bfloat16"),
    (1, 8192, 32, 32, 128, "bfloat16"),
    (8, 4096, 16, 32, 128, "bfloat16"),
    (8, 4096, 32, 32, 128, "float16"),
    (8, 4096, 32, 32, 128, "float32"),
    (1, 131072, 8, 8, 128, "bfloat16"),
    (1, 8192, 16, 16, 128, "bfloat16"),
]
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
BOUND = {"bfloat16": 8e-3, "float16": 2e-3, "float32": 1e-5}
KINDS = ("random", "no decay", "resets", "equal keys", "strength 2", "keys of norm 1.4")
# Milliseconds that others publish, (B, T, heads of q and k, heads of v): K = V = 128, bfloat16; nothing measured here
PUBLISHED = {
    "source": "FlashQLA's own table for an H200 (flash-qla 0.1.3, flashinfer 0.6.13 without context parallelism)",
    "forward": {(8, 4096, 32, 32): {"FlashQLA": 0.639, "FlashInfer": 0.452},
                (1, 32768, 32, 32): {"FlashQLA": 0.887, "FlashInfer": 1.556},
                (1, 8192, 32, 32): {"FlashQLA": 0.283, "FlashInfer": 0.395}},
    "backward": {(1, 32768, 16, 32): {"FlashQLA": 2.515}, (1, 8192, 16, 32): {"FlashQLA": 0.789}},
}  # fmt: skip
C = 64  # of the operations that are counted
FIRST = """
import json, time
import cupy as cp
import linattn_np as la
from bench.cuda_gated_delta_rule import draw
one = draw(cp, 1, 4096, 8, 8, 128, "bfloat16", 0)
cp.cuda.Device().synchronize()
began = time.perf_counter()
out, pullback = la.vjp(la.gated_delta_rule, *one[:5], backend="cuda")
cp.cuda.Device().synchronize()
middle = time.perf_counter()
pullback(one[5])
cp.cuda.Device().synchronize()
print(json.dumps({"forward_s": middle - began, "backward_s": time.perf_counter() - middle}))
"""


def draw(
    cp: Any, B: int, T: int, Hk: int, H: int, D: int, dtype: str, seed: int, kind: str = "random"
) -> list[Any]:
    """q, k, v, g, beta, dout; q, k of norm 1, log decays of 0 to -0.1, strengths of 0 to 1 unless `kind` says else."""
    import ml_dtypes

    element = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    rng = cp.random.default_rng(seed)
    q, k, v, dout = (rng.standard_normal((B, T, h, D), dtype=np.float32) for h in (Hk, Hk, H, H))
    if kind == "equal keys":
        k[:] = k[:, :1]
    q, k = (x / cp.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    g, beta = -0.1 * rng.random((B, T, H), dtype=np.float32), rng.random((B, T, H), dtype=np.float32)
    if kind in ("no decay", "equal keys"):
        g[:] = 0
    if kind == "equal keys":
        beta[:] = 1
    if kind == "resets":  # FLA's sums of log decays do not take -inf
        g = cp.where(rng.random(g.shape) < 0.1, np.float32(-50), g)
    if kind == "strength 2":
        beta *= 2
    if kind == "keys of norm 1.4":
        k *= np.float32(1.4)
    return [*(x.astype(element) for x in (q, k, v)), g, beta, dout.astype(element)]


def forward(one: list[Any]) -> Any:
    return la.gated_delta_rule(*one[:5], backend="cuda")


def both(one: list[Any]) -> Any:
    out, pullback = la.vjp(la.gated_delta_rule, *one[:5], backend="cuda")
    return [out, *pullback(one[5])[:5]]


def errors(cp: Any, dtype: str, peers: dict[str, cuda_peers.Pair], kinds: tuple[str, ...]) -> dict[str, Any]:
    """Relative errors of out and all gradients against float64, by kind of input and library."""
    found: dict[str, Any] = {}
    for kind in kinds:
        one = draw(cp, 1, 2047, 32, 32, 128, dtype, int.from_bytes(os.urandom(4), "little"), kind)
        wide = [x.astype(np.float64) for x in one]
        out, pullback = la.vjp(la.gated_delta_rule, *wide[:5], backend="chunks")
        exact = dict(zip(("out", "dq", "dk", "dv", "dg", "dbeta"), [out, *pullback(wide[5])[:5]], strict=True))
        calls = [("linattn_np", both, both)]
        calls += [(n, pair[1], lambda one, call=pair[0]: [call(one)[0]]) for n, pair in peers.items()]
        for name, call, less in calls:
            try:
                given = call(one)
            except Exception:  # a peer without a backward here
                given = less(one)
            result = zip(exact.items(), given, strict=False)
            found.setdefault(kind, {})[name] = {
                n: float(cp.linalg.norm(_array(cp, y).astype(np.float64) - x) / cp.linalg.norm(x))
                for (n, x), y in result}  # fmt: skip
    return found


def _array(cp: Any, y: Any) -> Any:
    return y if isinstance(y, cp.ndarray) else cp.from_dlpack(y.detach().float().contiguous())


def floors(group: int, D: int, size: int) -> dict[str, tuple[float, float]]:
    """Bytes and operations of a token and value head: forward, backward, both; `group` value heads share q and k."""
    keys, square = 2 * D * size / group, 2 * C * D
    ahead = (keys + 2 * D * size + 8, 5 * square + 6 * D * D + 2 * C * C)
    back = (2 * keys + 3 * D * size + 16, 14 * square + 16 * D * D)
    return {"forward": ahead, "backward": back, "both": (ahead[0] + back[0], ahead[1] + back[1])}


@contextlib.contextmanager
def set_to(name: str, value: Any, *plans: Any) -> Iterator[None]:
    """A constant of plans for a while."""
    before = [getattr(plan, name) for plan in plans]
    for plan in plans:
        setattr(plan, name, value)
    again.forget()  # a call that was kept was decided with the other
    try:
        yield
    finally:
        for plan, x in zip(plans, before, strict=True):
            setattr(plan, name, x)
        again.forget()


def forced(dtype: str) -> contextlib.AbstractContextManager[None]:
    """The portable kernels of the delta rule for what has no others, even where they are not taken unasked."""
    plans = () if dtype == "bfloat16" else (cuda_delta_plan, cuda_wgmma)
    return set_to("PORTABLE", True, *plans)


def ours(cp: Any, shape: tuple[Any, ...], ceilings: dict[str, Any], sets: list[list[Any]]) -> dict[str, Any]:
    B, T, Hk, H, D, dtype = shape
    th, row = B * T * H, {}

    def backwards() -> list[Any]:
        pulls = [la.vjp(la.gated_delta_rule, *one[:5], backend="cuda")[1] for one in sets]
        return [lambda pull=pull, one=one: pull(one[5]) for pull, one in zip(pulls, sets, strict=True)]

    calls = {"forward": [lambda one=one: forward(one) for one in sets], "backward": backwards(),
             "both": [lambda one=one: both(one) for one in sets]}
    for name, each in calls.items():
        ms = timing.median_ms(cp, each * 3)
        moved, operations = floors(H // Hk, D, BYTES[dtype])[name]
        row[name] = {"ms": ms, "ns": ms * 1e6 / th, "share_of_copy": moved * th / ms / 1e6 / ceilings["copy_gbs"],
                     "tflops": operations * th / ms / 1e9}
    ms = timing.graph_ms(cp, calls["forward"])
    row["forward"] |= {"graph_ms": ms, "graph_ns": ms * 1e6 / th}
    row["both"]["peak_bytes"] = peak(cp, calls["both"][0])
    row["forward"]["peak_bytes"] = peak(cp, calls["forward"][0])
    if dtype == "bfloat16":
        with set_to("SAVED_MIB", 0, cuda_delta_plan):
            ms = timing.median_ms(cp, backwards() * 3)
            row["backward, blocks made again"] = {"ms": ms, "ns": ms * 1e6 / th}
    if dtype == "bfloat16" and B > 1 and Hk == H:
        with set_to("PORTABLE", True, cuda_delta_plan, cuda_wgmma):
            for name, each in (("forward", calls["forward"]), ("backward", backwards())):
                ms = timing.median_ms(cp, each * 2)
                row[f"{name}, portable"] = {"ms": ms, "ns": ms * 1e6 / th}
    return row


def first_calls() -> dict[str, dict[str, float]]:
    """Seconds of the first forward and backward of a fresh process: empty caches, then filled ones."""
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {"LINATTN_CACHE_DIR": f"{folder}/ours", "CUDA_CACHE_PATH": f"{folder}/theirs",
                            "CUPY_CACHE_DIR": f"{folder}/cupy"}
        found = {}
        for name in ("empty caches", "filled caches"):
            ran = subprocess.run([sys.executable, "-c", FIRST], env=env, capture_output=True, text=True, check=False)
            found[name] = json.loads(ran.stdout) if not ran.returncode else {"failed": ran.stderr[-500:]}
    return found


def published() -> dict[str, Any]:
    """What others publish, in nanoseconds a token and value head."""
    rows = [{"case": list(case), "what": what, "library": library, "ns": ms * 1e6 / (case[0] * case[1] * case[3])}
            for what in ("forward", "backward") for case, found in PUBLISHED[what].items()
            for library, ms in found.items()]  # fmt: skip
    return {"source": PUBLISHED["source"], "rows": rows}


def case_of(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[n] for n in ("B", "T", "Hk", "H", "K", "dtype"))


def _show(row: dict[str, Any]) -> None:
    head = " ".join(str(row[n]) for n in ("B", "T", "Hk", "H", "K", "dtype"))
    for name, x in row["times"].items():
        cells = "  ".join(f"{n} {y:.4g}" if isinstance(y, float) else f"{n} {y}" for n, y in x.items())
        sys.stdout.write(f"{head:32s} {name:10s} {cells}\n")
    sys.stdout.flush()


def measure(
    cp: Any, ceilings: dict[str, Any], peers: dict[str, cuda_peers.Pair], shapes: list[Any]
) -> Iterator[dict[str, Any]]:
    """A row a shape."""
    for shape in shapes:
        B, T, Hk, H, D, dtype = shape
        sets = [draw(cp, *shape, seed=seed) for seed in range(2)]
        row = {"B": B, "T": T, "Hk": Hk, "H": H, "K": D, "V": D, "dtype": dtype}
        with forced(dtype):
            row["times"] = ours(cp, shape, ceilings, sets)
        for name, pair in peers.items() if dtype == "bfloat16" and Hk == H else ():
            for what, call in zip(("forward", "both"), pair, strict=True):
                try:
                    ms = timing.median_ms(cp, [lambda one=one, call=call: call(one) for one in sets] * 3)
                    used = cuda_peers.peak(lambda one=sets[0], call=call: call(one))
                except Exception as failed:  # a peer that does not take a shape
                    row["times"][f"{what}: {name}"] = {"failed": f"{type(failed).__name__}: {failed}"[:200]}
                    continue
                row["times"][f"{what}: {name}"] = {"ms": ms, "ns": ms * 1e6 / (B * T * H), "peak_bytes": used,
                                                   "times_ours": ms / row["times"][what]["ms"]}
        _show(row)
        yield row
        del sets
        cp.get_default_memory_pool().free_all_blocks()


def main(argv: list[str]) -> int:
    prog = "python -m bench gated_delta_rule --backend cuda"
    parser = argparse.ArgumentParser(prog=prog, description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=record.RESULTS, help="folder of the JSON file")
    parser.add_argument("--no-peers", action="store_true", help="leave other libraries out")
    parser.add_argument("--cases", type=int, nargs="+", help="these shapes alone, in place of their rows in the file")
    args = parser.parse_args(argv)
    import cupy as cp

    peers = {} if args.no_peers else cuda_peers.gated_delta_rule()
    found = {}
    for d in BYTES:
        with forced(d):
            found[d] = errors(cp, d, peers if d == "bfloat16" else {}, KINDS if d == "bfloat16" else KINDS[:1])
    own = {dtype: kinds["random"]["linattn_np"] for dtype, kinds in found.items()}
    if wrong := {dtype: e for dtype, e in own.items() if max(e.values()) > BOUND[dtype]}:
        sys.stderr.write(f"wrong: {wrong}\n")
        return 1
    ceilings = {"copy_gbs": timing.copy_gbs(cp), "matrix_tflops": timing.matrix_tflops(cp)}
    result = timing.card(cp) | ceilings | {"errors": found}
    if args.cases is not None:
        rows = measure(cp, ceilings, peers, [SHAPES[n] for n in args.cases])
        timing.replace(args.results, "cuda_gated_delta_rule", result, rows, case_of, SHAPES)
        return 0
    result["first_call"] = first_calls()
    sys.stdout.write("\n".join(f"{n}: {x}" for n, x in result.items()) + "\n")
    result["published"] = published()
    result["rows"] = rows = []
    for row in measure(cp, ceilings, peers, SHAPES):
        rows.append(row)
        path = timing.write(args.results, "cuda_gated_delta_rule", timing.rounded(result))  # what there is, each time
    sys.stdout.write(f"{path}\n")
    return 0
