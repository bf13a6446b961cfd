"""Simple GLA on a GPU: forward, backward and both, relative to the device's limits and other libraries.

    python -m bench simple_gla --backend cuda [--results FOLDER] [--no-peers] [--cases N ...]

Results are checked first against float64 on the same rounded inputs. `ms` is the GPU time of a call enqueued back to
back with others, inputs in rotation; `eager_ms` that of an eager loop, `graph_ms` that of a CUDA graph replay; ns are
per token and head, of `ms`. The lower bound of the time is each array read or written once at the measured copy rate;
operations: of the chunk form with chunks of 64. `passes`: wgmma, or the portable ones, which some cases force
on the same GPU. Retention and linear attention have no gate gradient. Mamba-2: dt and A, without skip and gate.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

import linattn_np as la
from bench.cuda import passes, peers, report, timing

FUNCTION = la.simple_gla


class Case(NamedTuple):
    """A function, its sizes (K = V), and whether the portable passes are forced."""

    function: str
    B: int
    T: int
    H: int
    K: int
    dtype: str
    forced: bool = False


CASES = [
    Case("simple_gla", 8, 4096, 32, 128, "bfloat16"),
    Case("simple_gla", 1, 32768, 32, 128, "bfloat16"),
    Case("simple_gla", 1, 131072, 8, 128, "bfloat16"),
    Case("simple_gla", 1, 8192, 16, 128, "bfloat16"),
    Case("simple_gla", 4, 4096, 16, 64, "bfloat16"),
    Case("retention", 8, 4096, 32, 128, "bfloat16"),
    Case("linear_attention", 8, 4096, 32, 128, "bfloat16"),
    Case("mamba2", 8, 4096, 32, 128, "bfloat16"),
    Case("simple_gla", 8, 4096, 32, 128, "bfloat16", forced=True),
    Case("simple_gla", 1, 32768, 32, 128, "bfloat16", forced=True),
    Case("simple_gla", 8, 4096, 32, 128, "float16"),
    Case("simple_gla", 8, 4096, 32, 128, "float32"),
    Case("simple_gla", 8, 4096, 32, 128, "tf32"),  # float32 with precision="tf32"
]
LONGEST_SOFTMAX = 32768  # tokens up to which softmax attention is timed too
BOUND = {"bfloat16": 4e-3, "float16": 8e-4, "float32": 4e-6, "tf32": 8e-4}


def draw(cp: Any, shape: tuple[int, int, int, int], dtype: str, seed: int, mixed: bool = False) -> list[Any]:
    """q, k, v, g, dout of shape (B, T, H, D), and dt and A of Mamba-2, with dt A = g; log decays of 0 to -0.1.

    mixed: without dt and A; rates of 0, 0.001, 0.05, 5 and resets in neighbouring heads.
    """
    import ml_dtypes

    kind = {"bfloat16": ml_dtypes.bfloat16, "tf32": "float32"}.get(dtype, dtype)
    rng, H = cp.random.default_rng(seed), shape[2]
    q, k, v, dout = (rng.standard_normal(shape, dtype=np.float32).astype(kind) for _ in range(4))
    u = 2 * rng.random(shape[:3], dtype=np.float32)
    if not mixed:
        A = cp.full(H, -0.05, dtype=np.float32)
        return [q, k, v, A * u, dout, u, A]
    rate = cp.asarray([0.0, 0.001, 0.05, 5.0, 0.1], dtype=np.float32)[cp.arange(H) % 5]
    resets = (cp.arange(H) % 5 == 4) & (u < 0.1)
    return [q, k, v, cp.where(resets, np.float32(-np.inf), -rate * u), dout]


def draw_first(cp: Any) -> list[Any]:
    """Inputs of the first call of a process."""
    return draw(cp, (1, 4096, 8, 128), "bfloat16", 0)[:5]


def precision_of(dtype: str) -> str | None:
    return "tf32" if dtype == "tf32" else None


def arrays_of(function: str, one: list[Any]) -> list[Any]:
    """The positional arrays of a function."""
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
    """Relative errors against float64: of whole arrays, and of the gate gradient in each head."""
    one = draw(cp, (2, 2047, 10, 128), dtype, seed=int.from_bytes(os.urandom(4), "little"), mixed=True)
    out, grads = both(one, precision=precision_of(dtype))
    wide = [x.astype(np.float64) for x in one]
    exact, pullback = la.vjp(la.simple_gla, *wide[:4], backend="chunks")
    expected = pullback(wide[4])

    def error(a: Any, b: Any) -> float:
        return float(cp.linalg.norm(a.astype(np.float64) - b) / cp.linalg.norm(b))

    found: dict[str, Any] = {"out": error(out, exact)}
    found |= {"d" + n: error(getattr(grads, n), getattr(expected, n)) for n in ("q", "k", "v", "g")}
    return found | {"dg by head": [error(grads.g[..., h], expected.g[..., h]) for h in range(10)]}


def work_of(D: int, size: int, gate: bool) -> dict[str, passes.Work]:
    """Work per token and head; size: bytes of an element, gate: whether there is a gate gradient."""
    square = 2 * passes.C * D
    ahead = passes.Work(4 * D * size + 4 * gate, 2 * square + 4 * D * D)
    return passes.three(ahead, passes.Work(7 * D * size + 8 * gate, 8 * square + 8 * D * D))


def ours(cp: Any, case: Case, limits: passes.Limits, sets: list[list[Any]]) -> dict[str, Any]:
    """Times of this library by pass."""
    function, precision = case.function, precision_of(case.dtype)
    pulls = [pullback_of(one, function, precision)[1] for one in sets]
    calls = {
        "forward": [lambda one=one: forward(one, function, precision) for one in sets],
        "backward": [lambda pull=pull, one=one: pull(one[4]) for pull, one in zip(pulls, sets, strict=True)],
        "both": [lambda one=one: both(one, function, precision) for one in sets],
    }
    work = work_of(case.K, passes.BYTES[case.dtype], function in ("simple_gla", "mamba2"))
    row = {name: passes.against_limits(cp, each * 3, case.B * case.T * case.H, work[name], limits)
           for name, each in calls.items()}  # fmt: skip
    for name in ("forward", "both"):
        row[name] |= {"eager_ms": timing.eager_ms(cp, calls[name]), "graph_ms": timing.graph_ms(cp, calls[name]),
                      "peak_bytes": timing.peak_bytes(cp, calls[name][0])}  # fmt: skip
    return row


def peer_rows(cp: Any, case: Case, sets: list[list[Any]], times: dict[str, Any]) -> dict[str, Any]:
    """Times of the peers that support a case, relative to ours, and how much their results differ from ours."""
    found: dict[str, Any] = {}
    for name, pair in peers.of(case.function).items():
        softmax = "SDPA" in name
        if softmax and (case.T > LONGEST_SOFTMAX or case.dtype != "bfloat16"):
            continue
        some = pair if case.dtype == "bfloat16" else pair[:1]
        for what, row, call in passes.peer_times(cp, some, sets, case.B * case.T * case.H, 1 if softmax else 3):
            if "ms" in row:
                row["times_ours"] = row["ms"] / times[what]["ms"]
            if "ms" in row and not softmax:
                which = 0 if what == "forward" else 1
                row["eager_ms"] = timing.eager_ms(cp, [lambda one=one, f=pair[which]: f(one) for one in sets])
                row["differences"] = differences(cp, what, call(), sets[0], case.function)
            found[f"{what}: {name}"] = row
    return found


def differences(cp: Any, what: str, peer_result: Any, one: list[Any], function: str) -> list[float]:
    """Relative differences of a peer's out, or out and gradients, from ours."""
    if what == "forward":
        return peers.differences(cp, peer_result[:1], (forward(one, function),))
    out, grads = both(one, function)
    return peers.differences(cp, (peer_result[0], *peer_result[1]), (out, *grads))


def forced(portable: bool) -> Any:
    """A context in which the portable passes are used, or the default ones."""
    return passes.override("PORTABLE", portable)


def measure(cp: Any, limits: passes.Limits, others: bool, cases: list[Case]) -> Iterator[dict[str, Any]]:
    """A row per case."""
    for case in cases:
        sets = [draw(cp, (case.B, case.T, case.H, case.K), case.dtype, seed) for seed in range(2)]
        with forced(case.forced):
            reason = la.explain(getattr(la, case.function), *arrays_of(case.function, sets[0])).reason
            row = {**case._asdict(), "V": case.K, "passes": "wgmma" if "wgmma" in reason else "mma.sync",
                   "times": ours(cp, case, limits, sets)}  # fmt: skip
        if others and not case.forced and case.dtype != "float16":
            row["times"] |= peer_rows(cp, case, sets, row["times"])
        report.show(row, ("function", "B", "T", "H", "K", "dtype", "passes"))
        yield row
        del sets
        cp.get_default_memory_pool().free_all_blocks()


def case_of(row: dict[str, Any]) -> Case:
    return Case(*(row[n] for n in Case._fields))


def main(argv: list[str]) -> int:
    parser = report.parser("simple_gla", __doc__)
    parser.add_argument("--cases", type=int, nargs="+", help="measure these cases only and replace their rows")
    args = parser.parse_args(argv)
    import cupy as cp

    found = {dtype: errors(cp, dtype) for dtype in BOUND}
    with forced(portable=True):
        found["bfloat16, portable"] = errors(cp, "bfloat16")
    wrong = {d: e for d, e in found.items() if max(e[n] for n in ("out", "dq", "dk", "dv")) > BOUND[d.split(",")[0]]}
    if wrong:
        sys.stderr.write(f"wrong: {wrong}\n")
        return 1
    limits = passes.limits_of(cp)
    result = report.device(cp) | limits | {"errors": found}
    if args.cases is not None:
        rows = measure(cp, limits, not args.no_peers, [CASES[n] for n in args.cases])
        report.replace(args.results, "cuda_simple_gla", result, rows, case_of, CASES)
        return 0
    result["first_call"] = passes.first_calls("simple_gla")
    sys.stdout.write("\n".join(f"{n}: {x}" for n, x in result.items() if n != "errors") + "\n")
    report.write_each(args.results, "cuda_simple_gla", result, measure(cp, limits, not args.no_peers, CASES))
    return 0
