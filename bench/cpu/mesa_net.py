"""MesaNet with 15 steps of conjugate gradients on a CPU, relative to the gated delta rule.

    python -m bench mesa_net [--rounds 7] [--write]

One thread, the same q, k, v, g, beta, samples interleaved. Reported are the ratio of the times, forward and backward,
and the error of 15 steps against the exact solution in float64, over the first 512 tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import linattn_np as la
from bench import record, timing
from bench.cpu import variants

ITERATIONS = 15
SOLVER = {"solver": "conjugate_gradients", "iterations": ITERATIONS, "tolerance": 0.0}


def draw(shape: tuple[int, int, int, int]) -> dict[str, np.ndarray]:
    """Unit q and k, log decays of 0 to -0.1 per token, ridge 1."""
    arrays = variants.draw_gated(shape)
    q = arrays["q"] / np.linalg.norm(arrays["q"], axis=-1, keepdims=True)
    return arrays | {"q": q, "ridge": np.ones((shape[2], shape[3]), np.float32)}


def calls(arrays: dict[str, np.ndarray], backward: bool) -> dict[str, Callable[[], Any]]:
    """gated_delta_rule, and mesa_net by compiled loops and by array calls."""
    dout, plain = np.ones_like(arrays["v"]), {n: x for n, x in arrays.items() if n != "ridge"}

    def call(fn: Any, given: dict[str, Any]) -> Any:
        if not backward:
            return fn(**given)
        out, pullback = la.vjp(fn, **given)
        return out, pullback(dout)

    given = {name: arrays | SOLVER | {"backend": name} for name in ("numba", "chunks")}
    own = {name: lambda name=name: call(la.mesa_net, given[name]) for name in given}
    return {"gated_delta_rule": lambda: call(la.gated_delta_rule, plain)} | own


def error(arrays: dict[str, np.ndarray]) -> float:
    """Error of the outputs after 15 steps in float32, relative to the largest output."""
    some = {n: x if n == "ridge" else x[:, :512] for n, x in arrays.items()}
    exact = la.mesa_net(**{n: x.astype(np.float64) for n, x in some.items()})
    return la.testing.relative_error(la.mesa_net(**some, **SOLVER), exact)


def main(arguments: list[str]) -> int:
    parser = record.parser("mesa_net", __doc__)
    parser.add_argument("--rounds", type=int, default=7)
    options, rows = parser.parse_args(arguments), []
    for shape in variants.SHAPES:
        arrays = draw(shape)
        off = error(arrays)
        for backward in (False, True):
            found = timing.interleaved(calls(arrays, backward), options.rounds)
            base = found["gated_delta_rule"]["gemm_gflop"]
            ratios = {name: found[name]["gemm_gflop"] / base for name in ("numba", "chunks")}
            rows.append({"(B, T, H, D)": str(shape), "what": "forward and backward" if backward else "forward",
                         "gated_delta_rule CPU ms": found["gated_delta_rule"]["cpu_ms"],
                         "compiled CPU ms": found["numba"]["cpu_ms"], "ratio": ratios["numba"],
                         "array calls CPU ms": found["chunks"]["cpu_ms"], "its ratio": ratios["chunks"],
                         "error": off})  # fmt: skip
            print(record.cells(rows[-1]), flush=True)
    if options.write:
        what = {"iterations": ITERATIONS, "threads": 1, "dtype": "float32"}
        print(record.write("mesa_net", what | {"rows": rows}))
    return 0
