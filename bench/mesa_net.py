"""`python -m bench mesa_net [--rounds 7] [--write]`: 15 steps of conjugate gradients beside the gated delta rule.

One thread, the same q, k, v, g, beta, in turns. What counts is the ratio of their times, forward and backward, and how
far 15 steps come: the error is against the exact solution in float64, over the first 512 tokens.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

from bench.compare import THREADS

for variable in THREADS:  # read when libraries are imported
    os.environ.setdefault(variable, "1")

import numpy as np  # noqa: E402

import linattn_np as la  # noqa: E402
from bench import gated_delta_rule as rule  # noqa: E402
from bench import record, timing  # noqa: E402

ITERATIONS = 15
SOLVER = {"solver": "conjugate_gradients", "iterations": ITERATIONS, "tolerance": 0.0}


def draw(shape: tuple[int, int, int, int]) -> dict[str, np.ndarray]:
    """q and k of length 1, decays of up to 0.1 a token, ridge 1."""
    arrays = rule.draw(shape)
    q = arrays["q"] / np.linalg.norm(arrays["q"], axis=-1, keepdims=True)
    return arrays | {"q": q, "ridge": np.ones((shape[2], shape[3]), np.float32)}


def calls(arrays: dict[str, np.ndarray], backward: bool) -> dict[str, Callable[[], Any]]:
    """gated_delta_rule, and mesa_net in compiled loops and in array calls."""
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
    """Of the outputs of 15 steps in float32, relative to the largest."""
    some = {n: x if n == "ridge" else x[:, :512] for n, x in arrays.items()}
    exact = la.mesa_net(**{n: x.astype(np.float64) for n, x in some.items()})
    return la.testing.relative_error(la.mesa_net(**some, **SOLVER), exact)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench mesa_net", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--write", action="store_true", help="keep the result under bench/results/")
    options, rows = parser.parse_args(arguments), []
    for shape in rule.SHAPES:
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
            print(*(f"{n}: {x:.3g}" if isinstance(x, float) else x for n, x in rows[-1].items()), sep="  ", flush=True)
    if options.write:
        what = {"iterations": ITERATIONS, "threads": 1, "dtype": "float32"}
        print(record.write("mesa_net", what | {"rows": rows}))
    return 0
