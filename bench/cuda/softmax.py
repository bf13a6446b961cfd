"""Softmax attention on a GPU, forward and backward, relative to the device's matrix rate and other libraries.

    python -m bench softmax --backend cuda [--results FOLDER] [--no-peers] [--cases N ...]

Results are checked first against float64 on the same rounded inputs. `ms` is the GPU time of a call enqueued back to
back with others, inputs in rotation; ns are per token and head of the queries. Operations: of the pairs that
are read, 2 (K + V) for each, 2.5 times as many backward. With gates pairs without weights are skipped, but counted
(cuda_src/softmax/limit.cuh): sigmoids around bias 3 are about 0.95 and forget in a thousand tokens, around 8 0.9997.
Peers, on the same arrays in the same run: PyTorch's scaled_dot_product_attention by FlashAttention and by cuDNN, and
FLA's parallel_forgetting_attn. With --cases these rows are replaced; peers that are not measured are carried over.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

import linattn_np as la
from bench.cuda import passes, peers, report, timing


class Case(NamedTuple):
    """A function, its sizes (K = V) and the heads of keys and values."""

    function: str
    B: int
    T: int
    H: int
    K: int = 128
    Hk: int | None = None
    dtype: str = "bfloat16"
    window: int | None = None
    bias: float = 3.0  # gates are sigmoids of normal numbers around it


CASES = [
    Case("softmax_attention", 8, 4096, 32), Case("softmax_attention", 8, 4096, 32, 64),
    Case("softmax_attention", 1, 32768, 8), Case("softmax_attention", 8, 4096, 32, Hk=8),
    Case("softmax_attention", 8, 4096, 32, dtype="float16"), Case("softmax_attention", 8, 4096, 32, window=512),
    Case("forgetting_attention", 8, 4096, 32), Case("forgetting_attention", 8, 4096, 32, 64),
    Case("forgetting_attention", 1, 16384, 16), Case("forgetting_attention", 8, 4096, 32, bias=8.0),
    Case("alibi", 8, 4096, 32),
]  # fmt: skip
BOUND = 1e-2  # of the norm of the output and of every gradient


def draw(cp: Any, case: Case, seed: int) -> tuple[dict[str, Any], Any]:
    """(the arrays of a call by name, the cotangent of its output)."""
    import ml_dtypes

    rng, (_, B, T, H, K, Hk, name, *_) = cp.random.default_rng(seed), case
    kind = np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
    normal = lambda heads: rng.standard_normal((B, T, heads, K), dtype=np.float32).astype(kind)  # noqa: E731
    found = {"q": normal(H), "k": normal(Hk or H), "v": normal(Hk or H)}
    if case.function == "forgetting_attention":
        found["g"] = -cp.log1p(cp.exp(-case.bias - rng.standard_normal((B, T, H), dtype=np.float32)))
    if case.function == "alibi":
        found["slopes"] = 2 ** (-8 * cp.arange(1, H + 1, dtype=np.float32) / H)
    return found, normal(H)


def forward(case: Case, arrays: dict[str, Any], backend: str = "cuda") -> Any:
    return getattr(la, case.function)(**arrays, window=case.window, backend=backend)


def both(case: Case, arrays: dict[str, Any], dout: Any, backend: str = "cuda") -> dict[str, Any]:
    """The output and every gradient, by name."""
    out, pullback = la.vjp(getattr(la, case.function), **arrays, window=case.window, backend=backend)
    return {"out": out} | {f"d{n}": d for n, d in pullback(dout)._asdict().items() if d is not None}


def errors(cp: Any, cases: list[Case], others: bool) -> dict[str, dict[str, dict[str, float]]]:
    """Relative errors against float64, by case, library and result."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for case in dict.fromkeys(c._replace(B=1, T=1023, H=4, Hk=c.Hk and 2) for c in cases):
        arrays, dout = draw(cp, case, int.from_bytes(os.urandom(4), "little"))
        wide = {n: x.astype(np.float64) for n, x in arrays.items()}
        exact = both(case, wide, dout.astype(np.float64), "chunks")
        libraries = {"linattn_np": both(case, arrays, dout)}
        for name, pair in peers.attention(case.function).items() if others and plain(case) else ():
            libraries[name] = dict(zip(exact, pair[1]([*arrays.values(), dout]), strict=False))
        key = f"{case.function}, {case.dtype}, {case.K}" + " grouped" * bool(case.Hk) + " window" * bool(case.window)
        key += f" gates around {1 / (1 + np.exp(-case.bias)):.4g}" * (case.bias != 3)
        found[key] = {name: {n: _error(cp, y, exact[n]) for n, y in results.items()}
                      for name, results in libraries.items()}  # fmt: skip
    return found


def case_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """The case of a row of the record."""
    found = Case._field_defaults | row
    return (*(found[n] for n in Case._fields if n != "Hk"), row["Hk"] or row["H"])


def plain(case: Case) -> bool:
    """Whether the peers have the case."""
    return case.window is None and case.dtype == "bfloat16"


def _error(cp: Any, y: Any, exact: Any) -> float:
    y = y if isinstance(y, cp.ndarray) else cp.from_dlpack(y.detach().float().contiguous())
    return float(cp.linalg.norm(y.astype(np.float64).reshape(exact.shape) - exact) / cp.linalg.norm(exact))


def work_of(case: Case) -> dict[str, passes.Work]:
    """Per token and head of the queries."""
    shared, W = (case.Hk or case.H) / case.H, min(case.window or case.T, case.T)
    keys = W - W * (W - 1) / 2 / case.T  # that a query reads, in the mean
    ahead = passes.Work((2 + 2 * shared) * 2 * case.K, 4 * case.K * keys)
    return passes.three(ahead, passes.Work((4 + 4 * shared) * 2 * case.K, 2.5 * ahead.operations))


def measure(cp: Any, cases: list[Case], limits: passes.Limits, others: bool) -> Iterator[dict[str, Any]]:
    """A row per case."""
    for case in cases:
        sets = [draw(cp, case, seed) for seed in range(2)]
        tokens, work, times = case.B * case.T * case.H, work_of(case), {}
        calls = {"forward": [lambda one=one, case=case: forward(case, one[0]) for one in sets],
                 "both": [lambda one=one, case=case: both(case, *one) for one in sets]}  # fmt: skip
        for name, each in calls.items():
            times[name] = passes.against_limits(cp, each * 2, tokens, work[name], limits)
            times[name]["peak_bytes"] = timing.peak_bytes(cp, each[0])
        given = [[*arrays.values(), dout] for arrays, dout in sets]
        for name, pair in peers.attention(case.function).items() if others and plain(case) else ():
            for what, row, _ in passes.peer_times(cp, pair, given, tokens, rounds=2):
                row |= {"times_ours": row["ms"] / times[what]["ms"]} if "ms" in row else {}
                times[f"{what}: {name}"] = row
        row = {**case._asdict(), "Hk": case.Hk or case.H, "times": times}
        report.show(row, ("function", "B", "T", "H", "Hk", "K", "dtype", "window", "bias"))
        yield row
        del sets, calls, given
        cp.get_default_memory_pool().free_all_blocks()


def main(argv: list[str]) -> int:
    parser = report.parser("softmax", __doc__)
    parser.add_argument("--cases", nargs="+", type=int, metavar="N")
    args = parser.parse_args(argv)
    import cupy as cp

    cases, others = CASES if args.cases is None else [CASES[n] for n in args.cases], not args.no_peers
    found = errors(cp, cases, others)
    own = {n: e["linattn_np"] for n, e in found.items()}
    if wrong := {n: e for n, e in own.items() if not max(e.values()) <= BOUND}:
        sys.stderr.write(f"wrong: {wrong}\n")
        return 1
    limits = passes.limits_of(cp)
    result = report.device(cp) | limits | {"errors": found}
    rows = measure(cp, cases, limits, others)
    if args.cases is None:
        report.write_each(args.results, "cuda_softmax", result, rows)
    else:
        report.replace(args.results, "cuda_softmax", result, rows, case_of, [case_of(c._asdict()) for c in CASES])
    return 0
