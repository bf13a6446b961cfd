"""The gated delta rule on a GPU: forward, backward and both, relative to the device's limits and FLA's Triton kernels.

    python -m bench gated_delta_rule --backend cuda [--results FOLDER] [--no-peers] [--cases N ...]

Results, FLA's too, are checked first against float64 on the same rounded inputs. Times are medians of CUDA events
around calls enqueued back to back, inputs in rotation; ns are per token and value head. The lower bound of the time
is each array read or written once at the measured copy rate; operations: of the chunk form with chunks of 64.
Two more paths are measured: a backward that recomputes its blocks, and the portable kernels.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

import linattn_np as la
from bench.cuda import passes, peers, report, timing
from linattn_np.matrix_state import policy

FUNCTION = la.gated_delta_rule


class Shape(NamedTuple):
    """Sizes of a case: Hk heads of q and k, H heads of v, K = V."""

    B: int
    T: int
    Hk: int
    H: int
    K: int
    dtype: str


SHAPES = [  # FLA compiles and tunes again for other numbers of heads
    Shape(8, 4096, 32, 32, 128, "bfloat16"),
    Shape(1, 32768, 32, 32, 128, "bfloat16"),
    Shape(1, 8192, 32, 32, 128, "bfloat16"),
    Shape(8, 4096, 16, 32, 128, "bfloat16"),
    Shape(8, 4096, 32, 32, 128, "float16"),
    Shape(8, 4096, 32, 32, 128, "float32"),
    Shape(1, 131072, 8, 8, 128, "bfloat16"),
    Shape(1, 8192, 16, 16, 128, "bfloat16"),
]
BOUND = {"bfloat16": 8e-3, "float16": 2e-3, "float32": 1e-5}
KINDS = ("random", "no decay", "resets", "equal keys", "strength 2", "keys of norm 1.4")
# Milliseconds published by others for (B, T, heads of q and k, heads of v), K = V = 128, bfloat16; not measured here
PUBLISHED = {
    "source": "FlashQLA's own table for an H200 (flash-qla 0.1.3, flashinfer 0.6.13 without context parallelism)",
    "forward": {(8, 4096, 32, 32): {"FlashQLA": 0.639, "FlashInfer": 0.452},
                (1, 32768, 32, 32): {"FlashQLA": 0.887, "FlashInfer": 1.556},
                (1, 8192, 32, 32): {"FlashQLA": 0.283, "FlashInfer": 0.395}},
    "backward": {(1, 32768, 16, 32): {"FlashQLA": 2.515}, (1, 8192, 16, 32): {"FlashQLA": 0.789}},
}  # fmt: skip


def draw(cp: Any, shape: Shape, seed: int, kind: str = "random") -> list[Any]:
    """q, k, v, g, beta, dout; by default unit q and k, log decays of 0 to -0.1, strengths of 0 to 1."""
    import ml_dtypes

    B, T, Hk, H, D, dtype = shape
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
    if kind == "resets":  # -50, because FLA's sums of log decays do not accept -inf
        g = cp.where(rng.random(g.shape) < 0.1, np.float32(-50), g)
    if kind == "strength 2":
        beta *= 2
    if kind == "keys of norm 1.4":
        k *= np.float32(1.4)
    return [*(x.astype(element) for x in (q, k, v)), g, beta, dout.astype(element)]


def draw_first(cp: Any) -> list[Any]:
    """Inputs of the first call of a process."""
    return draw(cp, Shape(1, 4096, 8, 8, 128, "bfloat16"), 0)


def forward(one: list[Any]) -> Any:
    return FUNCTION(*one[:5], backend="cuda")


def both(one: list[Any]) -> Any:
    out, pullback = la.vjp(FUNCTION, *one[:5], backend="cuda")
    return [out, *pullback(one[5])[:5]]


def errors(cp: Any, dtype: str, others: dict[str, peers.Pair], kinds: tuple[str, ...]) -> dict[str, Any]:
    """Relative errors of out and all gradients against float64, by kind of input and library."""
    found: dict[str, Any] = {}
    for kind in kinds:
        one = draw(cp, Shape(1, 2047, 32, 32, 128, dtype), int.from_bytes(os.urandom(4), "little"), kind)
        wide = [x.astype(np.float64) for x in one]
        out, pullback = la.vjp(FUNCTION, *wide[:5], backend="chunks")
        exact = dict(zip(("out", "dq", "dk", "dv", "dg", "dbeta"), [out, *pullback(wide[5])[:5]], strict=True))
        calls = [("linattn_np", both, both)]
        calls += [(n, pair[1], lambda one, call=pair[0]: [call(one)[0]]) for n, pair in others.items()]
        for name, call, forward_only in calls:
            try:
                results = call(one)
            except Exception:  # a peer without a backward on this device
                results = forward_only(one)
            found.setdefault(kind, {})[name] = {
                n: float(cp.linalg.norm(_array(cp, y).astype(np.float64) - x) / cp.linalg.norm(x))
                for (n, x), y in zip(exact.items(), results, strict=False)}  # fmt: skip
    return found


def _array(cp: Any, y: Any) -> Any:
    return y if isinstance(y, cp.ndarray) else cp.from_dlpack(y.detach().float().contiguous())


def work_of(group: int, D: int, size: int) -> dict[str, passes.Work]:
    """Work per token and value head; `group` value heads share a head of q and k, size: bytes of an element."""
    keys, square, C = 2 * D * size / group, 2 * passes.C * D, passes.C
    ahead = passes.Work(keys + 2 * D * size + 8, 5 * square + 6 * D * D + 2 * C * C)
    back = passes.Work(2 * keys + 3 * D * size + 16, 14 * square + 16 * D * D)
    return passes.three(ahead, back)


def forced(dtype: str) -> contextlib.AbstractContextManager[None]:
    """The portable delta-rule kernels for dtypes that have no others, also where they are not the default."""
    return passes.override("PORTABLE", policy.PORTABLE or dtype != "bfloat16")


def ours(cp: Any, shape: Shape, limits: passes.Limits, sets: list[list[Any]]) -> dict[str, Any]:
    """Times of this library by pass."""
    B, T, Hk, H, D, dtype = shape
    th, row = B * T * H, {}

    def backwards() -> list[Any]:
        pulls = [la.vjp(FUNCTION, *one[:5], backend="cuda")[1] for one in sets]
        return [lambda pull=pull, one=one: pull(one[5]) for pull, one in zip(pulls, sets, strict=True)]

    calls = {"forward": [lambda one=one: forward(one) for one in sets], "backward": backwards(),
             "both": [lambda one=one: both(one) for one in sets]}  # fmt: skip
    work = work_of(H // Hk, D, passes.BYTES[dtype])
    for name, each in calls.items():
        row[name] = passes.against_limits(cp, each * 3, th, work[name], limits)
    ms = timing.graph_ms(cp, calls["forward"])
    row["forward"] |= {"graph_ms": ms, "graph_ns": ms * 1e6 / th}
    for name in ("both", "forward"):
        row[name]["peak_bytes"] = timing.peak_bytes(cp, calls[name][0])
    if dtype == "bfloat16":
        with passes.override("cuda_saved_mib", 0, la.config):
            row["backward, recomputed"] = passes.timed(cp, backwards() * 3, th)
    if dtype == "bfloat16" and B > 1 and Hk == H:
        with passes.override("PORTABLE", True):
            for name, each in (("forward", calls["forward"]), ("backward", backwards())):
                row[f"{name}, portable"] = passes.timed(cp, each * 2, th)
    return row


def peer_rows(cp: Any, shape: Shape, sets: list[list[Any]], times: dict[str, Any], others: dict[str, peers.Pair]
           ) -> dict[str, Any]:  # fmt: skip
    """Times and memory of the peers by "pass: name"."""
    found = {}
    for name, pair in others.items():
        for what, row, call in passes.peer_times(cp, pair, sets, shape.B * shape.T * shape.H):
            if "ms" in row:
                row |= {"peak_bytes": peers.peak_bytes(call), "times_ours": row["ms"] / times[what]["ms"]}
            found[f"{what}: {name}"] = row
    return found


def published() -> dict[str, Any]:
    """Published times in nanoseconds per token and value head."""
    rows = [{"case": list(case), "what": what, "library": library, "ns": ms * 1e6 / (case[0] * case[1] * case[3])}
            for what in ("forward", "backward") for case, found in PUBLISHED[what].items()
            for library, ms in found.items()]  # fmt: skip
    return {"source": PUBLISHED["source"], "rows": rows}


def shape_of(row: dict[str, Any]) -> Shape:
    return Shape(*(row[n] for n in Shape._fields))


def measure(
    cp: Any, limits: passes.Limits, others: dict[str, peers.Pair], shapes: list[Shape]
) -> Iterator[dict[str, Any]]:
    """A row per shape."""
    for shape in shapes:
        sets = [draw(cp, shape, seed) for seed in range(2)]
        row = {"B": shape.B, "T": shape.T, "Hk": shape.Hk, "H": shape.H, "K": shape.K, "V": shape.K,
               "dtype": shape.dtype}  # fmt: skip
        with forced(shape.dtype):
            row["times"] = ours(cp, shape, limits, sets)
        if shape.dtype == "bfloat16" and shape.Hk == shape.H:
            row["times"] |= peer_rows(cp, shape, sets, row["times"], others)
        report.show(row, Shape._fields)
        yield row
        del sets
        cp.get_default_memory_pool().free_all_blocks()


def main(argv: list[str]) -> int:
    parser = report.parser("gated_delta_rule", __doc__)
    parser.add_argument("--cases", type=int, nargs="+", help="measure these shapes only and replace their rows")
    args = parser.parse_args(argv)
    import cupy as cp

    others = {} if args.no_peers else peers.gated_delta_rule()
    found = {}
    for d in BOUND:
        with forced(d):
            found[d] = errors(cp, d, others if d == "bfloat16" else {}, KINDS if d == "bfloat16" else KINDS[:1])
    own = {dtype: kinds["random"]["linattn_np"] for dtype, kinds in found.items()}
    if wrong := {dtype: e for dtype, e in own.items() if max(e.values()) > BOUND[dtype]}:
        sys.stderr.write(f"wrong: {wrong}\n")
        return 1
    limits = passes.limits_of(cp)
    result = report.device(cp) | limits | {"errors": found}
    if args.cases is not None:
        rows = measure(cp, limits, others, [SHAPES[n] for n in args.cases])
        report.replace(args.results, "cuda_gated_delta_rule", result, rows, shape_of, SHAPES)
        return 0
    result["first_call"] = passes.first_calls("gated_delta_rule")
    sys.stdout.write("\n".join(f"{n}: {x}" for n, x in result.items()) + "\n")
    result["published"] = published()
    report.write_each(args.results, "cuda_gated_delta_rule", result, measure(cp, limits, others, SHAPES))
    return 0
