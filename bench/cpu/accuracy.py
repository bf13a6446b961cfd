"""Errors of float32 and bfloat16 calls of every variant against float64 on the same numbers, in eps of the dtype.

    python -m bench accuracy [--draws 3] [--write]

Arrays from the specs (linattn_np/sampling.py), 2 sequences of 1000 tokens, 2 heads, K = V = 64; the worst of the draws.
An error is max |found - expected| / max |expected| over an array. Last rows: one unit key at every token and beta = 2,
where nothing is ever forgotten.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

import linattn_np as la
from bench import record
from linattn_np.testing import EPS, relative_error

SIZES = {"B": (2,), "T": 1000, "H": 2, "K": 64, "V": 64}
LENGTHS = 130, 1000
PATHS = {"loops": {"backend": "numba"}, "array calls": {"backend": "chunks"}, "token by token": {"chunk_size": 1}}


def gradients(fn: Any, arrays: dict[str, Any], dout: np.ndarray) -> dict[str, Any]:
    """Gradients of the arrays by name."""
    return {n: d for n, d in la.vjp(fn, **arrays)[1](dout)._asdict().items() if n in arrays and d is not None}


def errors(name: str, seed: int) -> dict[str, float]:
    """The error of `out` in float32 and bfloat16, and of each float32 gradient, in eps."""
    fn, rng = getattr(la, name), np.random.default_rng(seed)
    found = {}
    for kind, dtype in (("float32", np.float32), ("bfloat16", ml_dtypes.bfloat16)):
        arrays = {n: x.astype(dtype) for n, x in la.testing.sample(fn, rng, **SIZES).items()}
        wide = {n: x.astype(np.float64) for n, x in arrays.items()}
        out, exact = fn(**arrays), fn(**wide)
        found[f"{kind} out"] = relative_error(out, exact) / EPS[kind]
        if kind == "float32":
            dout = rng.standard_normal(out.shape).astype(np.float32)
            grads = gradients(fn, arrays, dout), gradients(fn, wide, dout.astype(np.float64))
            found |= {n: relative_error(d, grads[1][n]) / EPS[kind] for n, d in grads[0].items()}
    return found


def row(name: str, draws: int) -> dict[str, Any]:
    """The worst of the draws: outputs, and the gradient that is worst."""
    every = [errors(name, seed) for seed in range(draws)]
    worst = {n: max(e[n] for e in every) for n in every[0]}
    out, narrow = worst.pop("float32 out"), worst.pop("bfloat16 out")
    of = max(worst, key=lambda n: worst[n])
    return {"call": name, "float32 out": out, "worst float32 gradient": worst[of], "of": of, "bfloat16 out": narrow}


def repeated_key(T: int, path: str) -> dict[str, Any]:
    """The delta rule with one key at every token, beta = 2."""
    rng = np.random.default_rng(0)
    k = rng.standard_normal(64)
    q, v = rng.standard_normal((2, 1, T, 1, 64)).astype(np.float32)
    k = np.broadcast_to((k / np.linalg.norm(k)).astype(np.float32), q.shape)
    arrays = {"q": q, "k": k, "v": v, "beta": np.full((1, T, 1), 2, np.float32)}
    exact = la.delta_rule(**{n: x.astype(np.float64) for n, x in arrays.items()}, chunk_size=1)
    error = relative_error(la.delta_rule(**arrays, **PATHS[path]), exact) / EPS["float32"]
    return {"call": f"delta_rule, one key, beta = 2, T = {T}, {path}", "float32 out": error}


def main(arguments: list[str]) -> int:
    parser = record.parser("accuracy", __doc__)
    parser.add_argument("--draws", type=int, default=3)
    options = parser.parse_args(arguments)
    rows = []
    for name in [fn.__name__ for fn in la.VARIANTS]:
        rows.append(row(name, options.draws))
        print(record.cells(rows[-1]), flush=True)
    rows += [repeated_key(T, path) for T in LENGTHS for path in PATHS]
    for one in rows[-len(LENGTHS) * len(PATHS) :]:
        print(record.cells(one))
    if options.write:
        result = {"unit": "eps", "draws": options.draws, "T": SIZES["T"], "H": 2, "K = V": 64, "rows": rows}
        print(record.write("accuracy", record.rounded(result, 2)))
    return 0
