"""PaTH attention on a GPU, forward and backward, relative to the device's limits, softmax attention and FLA's kernels.

    python -m bench path_attention --backend cuda [--results FOLDER] [--no-peers] [--cases N ...]

Results are checked first against float64 on the same rounded inputs. `ms` is the GPU time of a call enqueued back to
back with others, inputs in rotation; ns are per token and head, of `ms`. Operations: of softmax attention with
half of the pairs, two products forward and five backward; the maps come on top. FLA takes w and beta in float32.
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
BOUND, GRADIENTS = 4e-3, 1.2e-2  # of the norm: of the output, of every gradient
Pair = tuple[dict[str, Any], Any]  # the arrays of a call by name, the cotangent of its output


def draw(cp: Any, case: Case, seed: int) -> Pair:
    """w of unit length, strengths 2 sigmoid of normal numbers."""
    import ml_dtypes

    rng, shape = cp.random.default_rng(seed), (case.B, case.T, case.H, case.K)
    made = {n: rng.standard_normal(shape, dtype=np.float32) for n in ("q", "k", "v", "w", "dout")}
    made["w"] /= cp.linalg.norm(made["w"], axis=-1, keepdims=True)
    made = {n: x.astype(ml_dtypes.bfloat16) for n, x in made.items()}
    dout = made.pop("dout")
    made["beta"] = 2 / (1 + cp.exp(-rng.standard_normal(shape[:3], dtype=np.float32)))
    return made | ({"g": -0.02 * rng.random(shape[:3], dtype=np.float32)} if case.gated else {}), dout


def forward(one: Pair) -> Any:
    return la.path_attention(**one[0], backend="cuda")


def both(one: Pair, backend: str = "cuda") -> dict[str, Any]:
    """The output and every gradient, by name."""
    out, pullback = la.vjp(la.path_attention, **one[0], backend=backend)
    return {"out": out} | {f"d{n}": d for n, d in pullback(one[1])._asdict().items() if d is not None}


def softmax(one: Pair) -> Any:
    plain = {n: one[0][n] for n in ("q", "k", "v", "g") if n in one[0]}
    return (la.forgetting_attention if "g" in plain else la.softmax_attention)(**plain, backend="cuda")


def errors(cp: Any, gated: bool) -> dict[str, float]:
    """The relative errors of the output and of each gradient against float64."""
    arrays, dout = draw(cp, Case(1, 1500, 2, 128, gated), int.from_bytes(os.urandom(4), "little"))
    wide = lambda x: cp.asnumpy(x).astype(np.float64)  # noqa: E731
    exact = both(({n: wide(x) for n, x in arrays.items()}, wide(dout)), "chunks")
    found = {n: wide(x) for n, x in both((arrays, dout)).items()}
    return {n: float(np.linalg.norm(found[n] - x) / np.linalg.norm(x)) for n, x in exact.items()}


def fla_calls() -> tuple[str, peers.Pair] | None:
    """FLA's kernels, by name and version; None where they are not installed."""
    try:
        import torch

        prefix, note = peers.fla()
        from fla.ops.path_attn.parallel import parallel_path_attn
    except Exception:  # not installed, or not with this PyTorch
        return None

    def given(one: Pair) -> dict[str, Any]:
        names = [n for n in ("q", "k", "v", "w", "beta", "g") if n in one[0]]
        found = dict(zip(names, peers.tensors(torch, [one[0][n] for n in names]), strict=True))
        return found | {"w": found["w"].float()}

    def forward(one: Pair) -> Any:
        with torch.no_grad():
            return (parallel_path_attn(**given(one))[0],)

    def both(one: Pair) -> Any:
        inputs = {n: x.detach().requires_grad_() for n, x in given(one).items()}
        out = parallel_path_attn(**inputs)[0]
        return out, *torch.autograd.grad(out, list(inputs.values()), peers.tensors(torch, [one[1]])[0])

    return f"{prefix} parallel_path_attn with w in float32, {note}", (forward, both)


def add_times(cp: Any, case: Case, limits: passes.Limits, others: bool, found: dict[str, Any]) -> Iterator[None]:
    """Add the times of a case to `found`: first ours, then FLA's one after the other, which compile for long."""
    sets = [draw(cp, case, seed) for seed in range(2)]
    tokens, pairs = case.B * case.T * case.H, (case.T + 1) / 2
    work = passes.three(*(passes.Work(5 * n * 2 * case.K, (6 * n - 2) * case.K * pairs) for n in (1, 2)))
    calls = {"forward": (forward, "forward", 3), "both": (both, "both", 2),
             "softmax attention: forward": (softmax, "forward", 3)}  # fmt: skip
    for name, (f, of, rounds) in calls.items():
        each = [lambda one=one, f=f: f(one) for one in sets]
        found[name] = passes.against_limits(cp, each * rounds, tokens, work[of], limits)
    found["both"]["peak_bytes"] = timing.peak_bytes(cp, lambda: both(sets[0]))
    yield
    if others and (peer := fla_calls()):
        name, pair = peer
        for what, row, call in passes.peer_times(cp, pair, sets, tokens, rounds=2):
            row |= {"times_ours": row["ms"] / found[what]["ms"]} if "ms" in row else {}
            if "ms" in row and not case.gated:  # FLA scales its gate
                names = ("out", "dq", "dk", "dv", "dw", "dbeta")[: 1 if what == "forward" else 6]
                ours = both(sets[0])
                apart = peers.differences(cp, call(), tuple(ours[n] for n in names))
                row["differences"] = dict(zip(names, apart, strict=True))
            found[f"{what}: {name}"] = row
            yield


def measure(cp: Any, limits: passes.Limits, others: bool, cases: list[Case]) -> Iterator[dict[str, Any]]:
    """A row per case."""
    for case in cases:
        row = {**case._asdict(), "V": case.K, "times": {}}
        for _ in add_times(cp, case, limits, others, row["times"]):
            yield row
        report.show(row, ("B", "T", "H", "K", "gated"))
        cp.get_default_memory_pool().free_all_blocks()


def main(argv: list[str]) -> int:
    parser = report.parser("path_attention", __doc__)
    parser.add_argument("--cases", nargs="+", type=int, default=list(range(len(CASES))), metavar="N")
    args = parser.parse_args(argv)
    import cupy as cp

    found = {"gated" if gated else "plain": errors(cp, gated) for gated in (False, True)}
    if any(not x <= (BOUND if n == "out" else GRADIENTS) for each in found.values() for n, x in each.items()):
        sys.stderr.write(f"wrong: {found}\n")
        return 1
    limits = passes.limits_of(cp)
    result = report.device(cp) | limits | {"errors": found}
    cases = [CASES[n] for n in args.cases]
    report.write_each(args.results, "cuda_path_attention", result, measure(cp, limits, not args.no_peers, cases))
    return 0
