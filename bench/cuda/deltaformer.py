"""DeltaFormer on a GPU, forward and backward: kernels beside array calls, PyTorch's formula and FLA's kernels.

    python -m bench deltaformer --backend cuda [--results FOLDER] [--no-peers] [--cases N ...]

Results are checked first against float64 on the same rounded inputs. `ms` is the GPU time of a call enqueued back to
back with others, inputs in rotation; ns are per token and head, of `ms`. Operations are 4 (K + V) for a token and half
of the tokens, 2.5 times as many backward. The formula has the matrices of all pairs; FLA's `deltaformer_attn` predicts
with the queries, and so do all rows: w = q. Its attention needs another package, PyTorch's takes its place.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np

import linattn_np as la
from bench.cuda import passes, peers, report, timing


class Case(NamedTuple):
    """Sizes (K = V)."""

    B: int
    T: int
    H: int
    K: int
    dtype: str = "bfloat16"


CASES = [Case(8, 4096, 16, 128), Case(1, 4096, 8, 128), Case(1, 16384, 4, 128), Case(2, 2048, 8, 64, "float32")]
BOUND = {"bfloat16": 2e-2, "float32": 1e-5}  # of the norm of the output and of every gradient
WIDEST = 2**28  # pairs of tokens of all heads for which the formula is measured
Pair = tuple[dict[str, Any], Any]  # the arrays of a call by name, the cotangent of its output


def draw(cp: Any, case: Case, seed: int) -> Pair:
    """Strengths are sigmoids of normal numbers."""
    import ml_dtypes

    rng, shape = cp.random.default_rng(seed), (case.B, case.T, case.H, case.K)
    kind = np.dtype(ml_dtypes.bfloat16 if case.dtype == "bfloat16" else case.dtype)
    made = {n: rng.standard_normal(shape, dtype=np.float32).astype(kind) for n in ("q", "k", "v", "dout")}
    dout = made.pop("dout")
    made["beta"] = 1 / (1 + cp.exp(-rng.standard_normal(shape[:3], dtype=np.float32)))
    return made | {"w": made["q"]}, dout


def forward(one: Pair, backend: str = "cuda") -> Any:
    return la.deltaformer(**one[0], backend=backend)


def both(one: Pair, backend: str = "cuda") -> dict[str, Any]:
    """The output and every gradient, by name."""
    out, pullback = la.vjp(la.deltaformer, **one[0], backend=backend)
    return {"out": out} | {f"d{n}": d for n, d in pullback(one[1])._asdict().items() if d is not None}


def errors(cp: Any, case: Case) -> dict[str, float]:
    """Relative errors against float64 on fresh inputs."""
    drawn, dout = draw(cp, case, int.from_bytes(os.urandom(4), "little"))
    wide = lambda x: cp.asnumpy(x).astype(np.float64)  # noqa: E731
    exact = both(({n: wide(x) for n, x in drawn.items()}, wide(dout)), "chunks")
    found = {n: wide(x) for n, x in both((drawn, dout)).items()}
    return {n: float(np.linalg.norm(found[n] - x) / np.linalg.norm(x)) for n, x in exact.items()}


def peers_of(case: Case) -> Iterator[tuple[str, peers.Pair]]:
    """Other libraries by name and version."""
    try:
        import torch
    except ImportError:
        return
    if case.B * case.H * case.T**2 <= WIDEST:
        yield f"torch {torch.__version__}, the formula", _pair(torch, _formula(torch))
    if case.dtype == "float32":
        return
    try:
        prefix, note = peers.fla()
        from fla.ops.deltaformer.parallel import ParallelDeltaformerFunction as Solve
    except Exception:  # not installed, or not with this PyTorch
        return

    def call(q: Any, k: Any, v: Any, beta: Any) -> Any:
        u = Solve.apply(q, k, v, beta.to(q.dtype), min(512, q.shape[1]), None)
        each = (x.transpose(1, 2) for x in (q, k, u))
        return torch.nn.functional.scaled_dot_product_attention(*each, is_causal=True).transpose(1, 2)

    yield f"{prefix} deltaformer, then SDPA, {note}", _pair(torch, call)


def _formula(torch: Any) -> Callable[..., Any]:
    """Softmax of all pairs and a triangular system, in float32."""

    def call(q: Any, k: Any, v: Any, beta: Any) -> Any:
        q, k, v = (x.transpose(1, 2).float() for x in (q, k, v))
        T, z = q.shape[2], q @ k.transpose(2, 3) * q.shape[3] ** -0.5
        later = torch.ones(T, T, dtype=torch.bool, device=q.device).triu()
        p = torch.nan_to_num(torch.softmax(z.masked_fill(later, -torch.inf), -1))
        B = beta.transpose(1, 2)[..., None] * p
        u = torch.linalg.solve_triangular(B, v, upper=False, unitriangular=True)
        return (torch.softmax(z.masked_fill(later.triu(1), -torch.inf), -1) @ u).transpose(1, 2)

    return call


def _pair(torch: Any, call: Callable[..., Any]) -> peers.Pair:
    """Of inputs (arrays by name, cotangent)."""

    def given(one: Pair) -> list[Any]:
        return peers.tensors(torch, [one[0][n] for n in ("q", "k", "v", "beta")])

    def forward(one: Pair) -> Any:
        with torch.no_grad():
            return call(*given(one))

    def both(one: Pair) -> Any:
        inputs = [x.detach().requires_grad_() for x in given(one)]
        out = call(*inputs)
        dout = peers.tensors(torch, [one[1]])[0]
        return out, *torch.autograd.grad(out, inputs, dout.to(out.dtype))

    return forward, both


def measure(cp: Any, cases: list[Case], limits: passes.Limits, others: bool) -> Iterator[dict[str, Any]]:
    """A row per case."""
    for case in cases:
        sets = [draw(cp, case, seed) for seed in range(2)]
        tokens, pairs, times = case.B * case.T * case.H, (case.T + 1) / 2, {}
        ahead = passes.Work(8 * case.K, 8 * case.K * pairs)
        work = passes.three(ahead, passes.Work(16 * case.K, 2.5 * ahead.operations))
        for name, f in (("forward", forward), ("both", both)):
            calls = [lambda one=one, f=f: f(one) for one in sets]
            times[name] = passes.against_limits(cp, calls, tokens, work[name], limits)
            times[name]["peak_bytes"] = timing.peak_bytes(cp, calls[0])
        by_arrays = "array calls", (partial(forward, backend="chunks"), partial(both, backend="chunks"))
        for name, pair in (by_arrays, *(peers_of(case) if others else ())):
            for what, row, _ in passes.peer_times(cp, pair, sets, tokens, rounds=1):
                row |= {"times_ours": row["ms"] / times[what]["ms"]} if "ms" in row else {}
                times[f"{what}: {name}"] = row
        row = {**case._asdict(), "times": times}
        report.show(row, Case._fields)
        yield row
        del sets
        cp.get_default_memory_pool().free_all_blocks()


def main(argv: list[str]) -> int:
    parser = report.parser("deltaformer", __doc__)
    parser.add_argument("--cases", nargs="*", type=int, default=list(range(len(CASES))), metavar="N")
    args = parser.parse_args(argv)
    import cupy as cp

    cases = [CASES[n] for n in args.cases]
    small = dict.fromkeys(c._replace(B=1, T=1023, H=2) for c in cases)
    found = {f"{c.dtype}, {c.K}": errors(cp, c) for c in small}
    if any(not e <= BOUND[n.split(",")[0]] for n, each in found.items() for e in each.values()):
        sys.stderr.write(f"wrong: {found}\n")
        return 1
    limits = passes.limits_of(cp)
    result = report.device(cp) | limits | {"errors": found}
    report.write_each(args.results, "cuda_deltaformer", result, measure(cp, cases, limits, not args.no_peers))
    return 0
