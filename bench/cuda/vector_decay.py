"""One decay a token and key channel on a GPU, forward, relative to the device's limits.

    python -m bench vector_decay --backend cuda [--results FOLDER] [--no-peers]

Results are checked first against float64 on the same rounded inputs. `ms` is the GPU time of a call enqueued back to
back with others, inputs in rotation, `graph_ms` that of a CUDA graph replay; ns are per token and head. The lower bound
of the time is each array read or written once at the measured copy rate. Gates: mild ones of 0 to -0.05 a token; -5 in
every channel; channels of up to 60 nats a token, with resets, which take the exact path in every head.
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
    """A function, its sizes (K = V), the dtype of its gates and their kind."""

    function: str
    B: int
    T: int
    H: int
    K: int = 128
    gate: str = "bfloat16"
    gates: str = "mild"


CASES = [
    Case("gla", 8, 4096, 32), Case("gla", 1, 32768, 32), Case("gla", 1, 131072, 8), Case("gla", 1, 8192, 16),
    Case("gla", 8, 4096, 32, gate="float32"), Case("gla", 1, 32768, 32, gate="float32"),
    Case("gla", 8, 4096, 32, gates="strong"), Case("gla", 8, 4096, 32, gates="exact"), Case("gla", 8, 4096, 32, 64),
    Case("rwkv6", 8, 4096, 32), Case("hgrn2", 8, 4096, 32),
    Case("kda", 8, 4096, 32), Case("kda", 1, 32768, 32), Case("kda", 1, 131072, 8), Case("kda", 1, 8192, 16),
    Case("kda", 8, 4096, 32, gate="float32"), Case("kda", 8, 4096, 32, gates="exact"),
]  # fmt: skip
BOUND = 6e-3  # of the norm of the output and of the state
PEERS = {"gla": "chunk_gla", "rwkv6": "chunk_rwkv6", "kda": "chunk_kda"}


def draw(cp: Any, case: Case, seed: int) -> dict[str, Any]:
    """The arrays of a call, by name."""
    import ml_dtypes

    rng, shape = cp.random.default_rng(seed), (case.B, case.T, case.H, case.K)
    q, k, v = (rng.standard_normal(shape, dtype=np.float32) for _ in range(3))
    u = rng.random(shape, dtype=np.float32)
    g = cp.full(shape, -5.0, dtype=np.float32) if case.gates == "strong" else -0.05 * u
    if case.gates == "exact":
        g = -u * 10 ** (5 * rng.random(shape[2:], dtype=np.float32) - np.float32(3.2))
        g[rng.random(shape, dtype=np.float32) < 0.01] = -np.inf
    kind = ml_dtypes.bfloat16
    if case.function == "kda":
        k /= cp.linalg.norm(k, axis=-1, keepdims=True)
    found = {"q": q.astype(kind), "k": k.astype(kind), "v": v.astype(kind),
             "g": g.astype(kind if case.gate == "bfloat16" else np.float32)}  # fmt: skip
    found["u"] = rng.standard_normal(shape[2:], dtype=np.float32)
    found["beta"] = rng.random(shape[:3], dtype=np.float32)
    return {n: found[n] for n in getattr(la, case.function).spec.arrays if n in found}


def forward(function: str, arrays: dict[str, Any], **options: Any) -> Any:
    return getattr(la, function)(**arrays, backend="cuda", **options)


def errors(cp: Any) -> dict[str, list[float]]:
    """Relative errors of output and state against float64, by function, gates and their dtype."""
    found = {}
    for case in dict.fromkeys(c._replace(B=2, T=1023, H=8, K=128) for c in CASES):
        arrays = draw(cp, case, int.from_bytes(os.urandom(4), "little"))
        ours = forward(case.function, arrays, return_state=True)
        wide = {n: x.astype(np.float64) for n, x in arrays.items()}
        exact = getattr(la, case.function)(**wide, return_state=True, backend="chunks")
        found[f"{case.function}, {case.gates} gates in {case.gate}"] = [
            float(cp.linalg.norm(a.astype(np.float64) - b) / cp.linalg.norm(b))
            for a, b in zip(ours, exact, strict=True)
        ]
    return found


def work_of(case: Case) -> passes.Work:
    """Per token and head; hgrn2 has no keys of its own. The delta rule: a gram, an inverse and two products more."""
    D, C, gate, delta = case.K, passes.C, passes.BYTES[case.gate], case.function == "kda"
    rows = 3 if case.function == "hgrn2" else 4
    more = delta * (4 * C * D + C * C + 2 * D * D)
    return passes.Work(rows * 2 * D + gate * D + 4 * delta, 4 * C * D + 4 * D * D + more)


def measure(cp: Any, limits: passes.Limits, others: bool) -> Iterator[dict[str, Any]]:
    """A row per case."""
    for case in CASES:
        sets = [draw(cp, case, seed) for seed in range(2)]
        calls = [lambda one=one, fn=case.function: forward(fn, one) for one in sets]
        tokens = case.B * case.T * case.H
        row = passes.against_limits(cp, calls * 3, tokens, work_of(case), limits)
        row |= {"graph_ms": timing.graph_ms(cp, calls), "peak_bytes": timing.peak_bytes(cp, calls[0])}
        times = {"forward": row}
        if others and case.gates == "mild":
            times |= theirs(cp, case, sets, row)
        row = {**case._asdict(), "times": times}
        report.show(row, ("function", "B", "T", "H", "K", "gate", "gates"))
        yield row
        del sets, calls
        cp.get_default_memory_pool().free_all_blocks()


def theirs(cp: Any, case: Case, sets: list[dict[str, Any]], ours: dict[str, Any]) -> dict[str, Any]:
    """Times of FLA's kernels, relative to ours, where it is installed and has them."""
    try:
        import torch

        prefix, note = peers.fla()
        function = getattr(__import__("fla.ops", fromlist=["ops"]), PEERS[case.function])
    except Exception:  # not installed, or not for this function
        return {}

    def call(one: dict[str, Any]) -> Any:
        with torch.no_grad():
            return function(*peers.tensors(torch, list(one.values())))

    (_, row, _), = passes.peer_times(cp, (call,), sets, case.B * case.T * case.H)
    if "ms" in row:
        row["times_ours"] = row["ms"] / ours["ms"]
    return {f"forward: {prefix} {function.__name__}, {note}": row}


def main(argv: list[str]) -> int:
    args = report.parser("vector_decay", __doc__).parse_args(argv)
    import cupy as cp

    found = errors(cp)
    if wrong := {n: e for n, e in found.items() if not max(e) <= BOUND}:
        sys.stderr.write(f"wrong: {wrong}\n")
        return 1
    limits = passes.limits_of(cp)
    result = report.device(cp) | limits | {"errors": found}
    report.write_each(args.results, "cuda_vector_decay", result, measure(cp, limits, not args.no_peers))
    return 0
