"""PaTH attention on a GPU: forward, relative to the device's limits, softmax attention and FLA's Triton kernels.

    python -m bench path_attention --backend cuda [--results FOLDER] [--no-peers] [--few]

Results are checked first against float64 on the same rounded inputs. `ms` is the GPU time of a call enqueued back to
back with others, inputs in rotation; ns are per token and head, of `ms`. Operations are those of softmax attention's
two products with half of the pairs; the maps come on top. FLA takes w and beta in float32.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

import linattn_np as la
from bench.cuda import passes, peers, report


class Case(NamedTuple):
    """Sizes (K = V), and whether there are gates."""

    B: int
    T: int
    H: int
    K: int
    gated: bool = False


CASES = [
    Case(8, 4096, 32, 128), Case(8, 4096, 32, 128, True), Case(8, 4096, 32, 64), Case(1, 32768, 32, 128),
    Case(1, 4096, 32, 128),
]  # fmt: skip
BOUND = 4e-3


def draw(cp: Any, case: Case, seed: int) -> dict[str, Any]:
    """The arrays of a call by name: w of unit length, strengths 2 sigmoid of normal numbers."""
    import ml_dtypes

    rng, shape = cp.random.default_rng(seed), (case.B, case.T, case.H, case.K)
    made = {n: rng.standard_normal(shape, dtype=np.float32) for n in ("q", "k", "v", "w")}
    made["w"] /= cp.linalg.norm(made["w"], axis=-1, keepdims=True)
    made = {n: x.astype(ml_dtypes.bfloat16) for n, x in made.items()}
    made["beta"] = 2 / (1 + cp.exp(-rng.standard_normal(shape[:3], dtype=np.float32)))
    return made | ({"g": -0.02 * rng.random(shape[:3], dtype=np.float32)} if case.gated else {})


def forward(one: dict[str, Any]) -> Any:
    return la.path_attention(**one, backend="cuda")


def softmax(one: dict[str, Any]) -> Any:
    plain = {n: one[n] for n in ("q", "k", "v", "g") if n in one}
    return (la.forgetting_attention if "g" in one else la.softmax_attention)(**plain, backend="cuda")


def error(cp: Any, gated: bool) -> float:
    """The relative error of the output against float64."""
    one = draw(cp, Case(1, 1500, 2, 128, gated), int.from_bytes(os.urandom(4), "little"))
    exact = la.path_attention(**{n: cp.asnumpy(x).astype(np.float64) for n, x in one.items()}, backend="chunks")
    return float(np.linalg.norm(cp.asnumpy(forward(one)).astype(np.float64) - exact) / np.linalg.norm(exact))


def fla_forward() -> tuple[str, Any] | None:
    """FLA's kernels, by name and version; None where they are not installed."""
    try:
        import torch

        prefix, note = peers.fla()
        from fla.ops.path_attn.parallel import parallel_path_attn
    except Exception:  # not installed, or not with this PyTorch
        return None

    def call(one: dict[str, Any]) -> Any:
        names = [n for n in ("q", "k", "v", "w", "beta", "g") if n in one]
        given = dict(zip(names, peers.tensors(torch, [one[n] for n in names]), strict=True))
        given["w"] = given["w"].float()
        with torch.no_grad():
            return parallel_path_attn(**given)[0]

    return f"{prefix} parallel_path_attn with w in float32, {note}", call


def times_of(cp: Any, case: Case, limits: passes.Limits, others: bool) -> dict[str, Any]:
    """The times of a case."""
    sets = [draw(cp, case, seed) for seed in range(2)]
    size, tokens = 2, case.B * case.T * case.H
    work = passes.Work(5 * case.K * size, 2 * 2 * case.K * (case.T + 1) / 2)
    calls = {"forward": forward, "softmax attention: forward": softmax}
    found = {n: passes.against_limits(cp, [lambda one=one, f=f: f(one) for one in sets] * 3, tokens, work, limits)
             for n, f in calls.items()}  # fmt: skip
    peer = fla_forward() if others else None
    if peer is not None:
        name, call = peer
        try:
            row = passes.timed(cp, [lambda one=one: call(one) for one in sets] * 2, tokens)
            row["times_ours"] = row["ms"] / found["forward"]["ms"]
            if not case.gated:  # FLA scales its gate
                row["differences"] = peers.differences(cp, (call(sets[0]),), (forward(sets[0]),))
        except Exception as failed:  # a peer that does not support the case
            row = passes.failure(failed)
        found[f"forward: {name}"] = row
    return found


def measure(cp: Any, limits: passes.Limits, others: bool, cases: list[Case]) -> Iterator[dict[str, Any]]:
    """A row per case."""
    for case in cases:
        row = {**case._asdict(), "V": case.K, "times": times_of(cp, case, limits, others)}
        report.show(row, ("B", "T", "H", "K", "gated"))
        yield row
        cp.get_default_memory_pool().free_all_blocks()


def main(argv: list[str]) -> int:
    parser = report.parser("path_attention", __doc__)
    parser.add_argument("--few", action="store_true", help="the first three cases only")
    args = parser.parse_args(argv)
    import cupy as cp

    found = {"gated" if gated else "plain": error(cp, gated) for gated in (False, True)}
    if max(found.values()) > BOUND:
        sys.stderr.write(f"wrong: {found}\n")
        return 1
    limits = passes.limits_of(cp)
    result = report.device(cp) | limits | {"errors": found}
    cases = CASES[:3] if args.few else CASES
    report.write_each(args.results, "cuda_path_attention", result, measure(cp, limits, not args.no_peers, cases))
    return 0
