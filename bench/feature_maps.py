"""`python -m bench feature_maps [--rounds 7] [--write]`: performer and based beside a matrix product.

One thread, float32. What counts is the share: operations of the products (of the core by its formula, and of FAVOR+'s
projection) over what the product beside them could have done in the same time. "core" is linear_attention of features
that were made before.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

from bench.compare import THREADS

for variable in THREADS:  # read when libraries are imported
    os.environ.setdefault(variable, "1")

import numpy as np  # noqa: E402

import linattn_np as la  # noqa: E402
from bench import record, timing  # noqa: E402

CALLS = (("performer", la.performer, "favor+", (2, 2048, 4, 64, 64)),
         ("based", la.based, "taylor", (2, 2048, 4, 16, 64)),
         ("rfa", la.rfa, "fourier", (2, 2048, 4, 64, 64)))  # fmt: skip


def row(name: str, fn: Any, feature_map: str, sizes: tuple[int, ...], rounds: int, backward: bool) -> dict[str, Any]:
    """CPU times and shares of one function, of its maps alone and of its core alone."""
    B, T, H, K, V = sizes
    rng = np.random.default_rng(0)
    q, k = (0.5 * rng.standard_normal((2, B, T, H, K))).astype(np.float32)
    v = rng.standard_normal((B, T, H, V)).astype(np.float32)
    phi, dout = la.feature_maps.FEATURE_MAPS[feature_map][0], np.ones_like(v)
    fq, fk, wide = phi(q), phi(k), np.concatenate([v, np.ones_like(v[..., :1])], axis=-1)
    dwide = np.ones_like(wide)

    def both(function: Any, d: Any, *arrays: Any) -> Any:
        if not backward:
            return function(*arrays, num_threads=1)
        _, pullback = la.vjp(function, *arrays, num_threads=1)
        return pullback(d)

    found = timing.interleaved({"whole": lambda: both(fn, dout, q, k, v), "maps": lambda: (phi(q), phi(k)),
                                "core": lambda: both(la.linear_attention, dwide, fq, fk, wide)}, rounds)  # fmt: skip
    M, tokens = fq.shape[-1], B * T * H
    core = la.explain(la.linear_attention, fq, fk, wide).operations / 1e9
    projected = 2 * tokens * 2 * K * (M if name == "performer" else M // 2) / 1e9 if name != "based" else 0.0
    times = 3 if backward else 1
    share = {n: times * gflop / found[n]["gemm_gflop"]
             for n, gflop in (("whole", core + projected), ("core", core))}  # fmt: skip
    return {"function": name, "(B, T, H, K, V)": str(sizes), "features": M,
            "what": "forward and backward" if backward else "forward", "CPU ms": found["whole"]["cpu_ms"],
            "maps' CPU ms": found["maps"]["cpu_ms"], "core's CPU ms": found["core"]["cpu_ms"],
            "share of the product's rate": share["whole"], "core's share": share["core"]}  # fmt: skip


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench feature_maps", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--write", action="store_true", help="keep the result under bench/results/")
    options, rows = parser.parse_args(arguments), []
    for backward in (False, True):
        for call in CALLS:
            rows.append(row(*call, options.rounds, backward))
            print(*(f"{n}: {x:.3g}" if isinstance(x, float) else x for n, x in rows[-1].items()), sep="  ", flush=True)
    if options.write:
        print(record.write("feature_maps", {"threads": 1, "dtype": "float32", "rows": rows}))
    return 0
