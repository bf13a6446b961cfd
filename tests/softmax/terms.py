"""What the gradients of logits are differences of, for bounds of their errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

import linattn_np as la

# of the terms: half a unit in the last place of an output in 16 bits, twice; of float32 sums of products of tf32 terms
ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-20}


def cancelling(arrays: Mapping[str, Any], exact: Mapping[str, Any], dout: Any, **options: Any) -> dict[str, float]:
    """Norms of the terms of dq, dk, dw and dg of deltaformer, in float64.

    dz_ij = p_ij (dout_i.v_j - dout_i.out_i) is a difference of inner products of V numbers, which are equal where p_ij
    is 1, as under strong gates. dout_i.out_i is off by a rounding of |dout_i| |out_i| / sqrt(V), whatever dz is.
    """
    u = la.deltaformer(**arrays, **options, backend="chunks", return_state=True).state.v
    offsets = options.get("cu_seqlens")
    if offsets is not None:
        u = np.concatenate([row[: e - s] for row, s, e in zip(u, offsets, offsets[1:], strict=False)])[None]
    size = lambda x: np.linalg.norm(x, axis=-1)  # noqa: E731
    far, near = size(dout) * size(exact["out"]), size(exact["dv"]) * size(arrays["v"] - u)
    attention, system = (np.linalg.norm(x) / np.sqrt(dout.shape[-1]) for x in (far, near))
    scale = options.get("scale", arrays["k"].shape[-1] ** -0.5)
    q, k, w = (scale * np.sqrt(np.mean(size(arrays[n]) ** 2)) for n in ("q", "k", "w" if "w" in arrays else "k"))
    return {"dq": k * attention, "dk": q * attention + w * system, "dw": k * system, "dg": attention + system}
