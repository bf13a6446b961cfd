"""What states at positions cost on a CUDA device: calls with 16 of them relative to calls with none.

    python -m bench states --backend cuda [--functions NAME ...]

bfloat16, 8 x 32 heads; calls without and with positions alternate, medians. Positions are at the ends of chunks; the
last rows are of a packed batch, and of positions inside chunks, which are computed in pieces. The byte floor is the
time that the bytes of the states take at the rate of a copy, written by forward, with backward read once more.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

import linattn_np as la
from bench.cuda import report, timing

B, H, COUNT, ROUNDS = 8, 32, 16, 3


class Case(NamedTuple):
    """A function, its tokens and widths, and where the positions are."""

    function: str
    T: int
    D: int
    where: str = "chunks"  # or "packed": 8 sequences in a row; or "inside": 37 tokens before the ends of chunks

    @property
    def positions(self) -> list[int]:
        each = self.T // COUNT
        if self.where == "packed":  # two a sequence
            return [n * self.T + m * self.T // 2 for n in range(B) for m in (1, 2)]
        return [n - 37 * (self.where == "inside") for n in range(each, self.T + 1, each)]


FUNCTIONS = ("simple_gla", "gated_delta_rule", "gla", "kda")
CASES = [Case(name, T, D) for name in FUNCTIONS for T, D in ((4096, 128), (4096, 64), (16384, 64))]
CASES += [Case(name, 4096, 128, where) for name in FUNCTIONS[:2] for where in ("packed", "inside")]


def draw(cp: Any, case: Case) -> dict[str, Any]:
    """Random inputs of a call."""
    import ml_dtypes

    rng, lead = cp.random.default_rng(0), (1, B * case.T) if case.where == "packed" else (B, case.T)
    q, k, v = (rng.standard_normal((*lead, H, case.D), dtype=np.float32) for _ in range(3))
    k /= cp.linalg.norm(k, axis=-1, keepdims=True)
    arrays = {n: x.astype(ml_dtypes.bfloat16) for n, x in {"q": q, "k": k, "v": v}.items()}
    vector = case.function in ("gla", "kda")
    g = -0.05 * rng.random((*lead, H, *((case.D,) if vector else ())), dtype=np.float32)
    arrays["g"] = g.astype(ml_dtypes.bfloat16) if vector else g
    if case.function in ("gated_delta_rule", "kda"):
        arrays["beta"] = rng.random((*lead, H), dtype=np.float32)
    return arrays


def call_of(case: Case, arrays: dict[str, Any], states: bool, dout: Any) -> Callable[[], Any]:
    """A call; with dout its gradients too, of all states included."""
    fn, options = getattr(la, case.function), {}
    if case.where == "packed":
        options["cu_seqlens"] = [n * case.T for n in range(B + 1)]
    if states:
        options["return_states_at"] = case.positions
    if dout is None:
        return lambda: fn(**arrays, **options)

    def both() -> Any:
        result, pullback = la.vjp(fn, **arrays, **options)
        return pullback(dout, None, result.states) if states else pullback(dout)

    return both


def measure(cp: Any, case: Case, rate: float) -> Iterator[dict[str, Any]]:
    """Rows of forward, and of forward with backward."""
    arrays = draw(cp, case)
    size = COUNT * (1 if case.where == "packed" else B) * H * case.D**2 * 4
    for what, dout, passes in (("forward", None, 1), ("both", cp.ones_like(arrays["v"]), 2)):
        calls = [call_of(case, arrays, states, dout) for states in (False, True)]
        times: list[list[float]] = [[], []]
        for _ in range(ROUNDS):
            for n, call in enumerate(calls):
                times[n].append(timing.median_ms(cp, [call] * 3, 3))
        none, states = (statistics.median(each) for each in times)
        floor = passes * size / rate / 1e6
        row = {**case._asdict(), "what": what, "none_ms": none, "states_ms": states,
               "percent": 100 * (states / none - 1), "state_bytes": size, "floor_ms": floor,
               "floor_percent": 100 * floor / none}  # fmt: skip
        sys.stdout.write(" ".join(f"{x:.4g}" if isinstance(x, float) else str(x) for x in row.values()) + "\n")
        sys.stdout.flush()
        yield row


def main(argv: list[str]) -> int:
    parser = report.parser("states", __doc__, peers=False)
    parser.add_argument("--functions", nargs="+", default=FUNCTIONS)
    args = parser.parse_args(argv)
    import cupy as cp

    result = report.device(cp) | {"copy_gbs": timing.copy_gbs(cp), "B": B, "H": H, "states": COUNT, "dtype": "bfloat16"}
    sys.stdout.write(f"{result['gpu']}, copies {result['copy_gbs']:.0f} GB/s\n")

    def rows() -> Iterator[dict[str, Any]]:
        for case in CASES:
            if case.function in args.functions:
                yield from measure(cp, case, result["copy_gbs"])
                cp.get_default_memory_pool().free_all_blocks()

    report.write_each(args.results, "cuda_states", result, rows())
    return 0
