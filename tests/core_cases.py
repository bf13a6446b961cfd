"""Random inputs for every cell of the matrix-state core, straight at its own signature."""

from __future__ import annotations

import array_api_compat.numpy as xp
import numpy as np

from linattn_np.matrix_state.types import Inputs, Plan, ReadState
from linattn_np.runtime.shapes import sequences

DECAYS = ("none", "scalar", "vector", "value", "outer", "constant")
ERASES = ("none", "delta", "delta undecayed", "free")
CELLS = [
    (d, e, r)
    for d in DECAYS
    for e in ERASES
    for r in ("after", "before", "bonus")
    if (e == "none" or d not in ("value", "outer")) and (e == "none" or r == "after")
]


def case(decay, erase, read, T=21, C=8, heads=(2, 2, 2), K=5, V=3, B=2, seed=0, offsets=None, dtype=np.float64):
    """(Inputs, Plan, initial state, dout, dstate) of one cell; heads = (Hq, Hk, H)."""
    rng = np.random.default_rng(seed)
    Hq, Hk, H = heads
    n = rng.standard_normal
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)  # noqa: E731
    g = {
        "none": None,
        "scalar": -rng.uniform(0, 1, (B, T, H, 1)),
        "vector": -rng.uniform(0, 1, (B, T, H, K)),
        "constant": np.broadcast_to(-rng.uniform(0, 1, (H, 1)), (T, H, 1)),
        "value": None,
        "outer": -rng.uniform(0, 1, (B, T, H, K)),
    }[decay]
    gv = -rng.uniform(0, 1, (B, T, H, V)) if decay in ("value", "outer") else None
    k = unit(n((B, T, Hk, K)))
    arrays = {"q": n((B, T, Hq, K)), "k": k, "v": n((B, T, H, V)), "g": g, "gv": gv}
    if erase.startswith("delta"):
        arrays |= {"r": unit(n((B, T, Hk, K))), "beta": rng.uniform(0, 2, (B, T, H, 1))}
    if erase == "free":
        arrays |= {"a": -k, "b": k * rng.uniform(0, 1, (B, T, Hk, 1))}
    if read == "bonus":
        arrays |= {"u": n((H, K))}
    N = B if offsets is None else len(offsets) - 1
    arrays = {
        name: None if y is None else y.astype(dtype) if decay != "constant" or name != "g" else y
        for name, y in arrays.items()
    }
    plan = Plan(
        xp,
        dtype,
        0.7,
        ReadState.UPDATED if read == "after" else ReadState.PREVIOUS,
        ReadState.PREVIOUS if erase.endswith("undecayed") else ReadState.DECAYED,
        True,
        C,
        tuple(sequences(T, offsets)),
    )
    state, dstate = n((2, N, H, K, V)).astype(dtype)
    return Inputs(**arrays), plan, state, n((B, T, max(Hq, H), V)).astype(dtype), dstate
