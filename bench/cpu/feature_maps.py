"""Feature maps on a CPU, performer, based and rfa, relative to a matrix product.

    python -m bench feature_maps [--rounds 7] [--write]

One thread, float32. The figure of merit is the share: operations of the matrix products (of the core by its formula,
and of FAVOR+'s projection) over what the reference product would have done in the same time. "core" is
linear_attention on precomputed features.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import linattn_np as la
from bench import record, timing

CALLS = (("performer", la.performer, "favor+", (2, 2048, 4, 64, 64)),
         ("based", la.based, "taylor", (2, 2048, 4, 16, 64)),
         ("rfa", la.rfa, "fourier", (2, 2048, 4, 64, 64)))  # fmt: skip


def row(name: str, fn: Any, feature_map: str, sizes: tuple[int, ...], rounds: int, backward: bool) -> dict[str, Any]:
    """CPU times and shares of the whole function, of its feature maps and of its core."""
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
    parser = record.parser("feature_maps", __doc__)
    parser.add_argument("--rounds", type=int, default=7)
    options, rows = parser.parse_args(arguments), []
    for backward in (False, True):
        for call in CALLS:
            rows.append(row(*call, options.rounds, backward))
            print(record.cells(rows[-1]), flush=True)
    if options.write:
        print(record.write("feature_maps", {"threads": 1, "dtype": "float32", "rows": rows}))
    return 0
