"""The logs of the sums beside the outputs: with plan.lse the core's out is (..., T, heads, V + 1), lse the last one.

    lse_i = log(e^{sink} + sum_j e^{z_ij}),   dlse_i / dz_ij = p_ij

so that dz_ij = p_ij (dout_i . v_j - (dout_i . out_i - dlse_i)): backward subtracts dlse from dout_i . out_i.
"""

from __future__ import annotations

from typing import Any

from ..runtime.arrays import Array, cast, device
from . import heads
from .types import Inputs, SoftmaxPlan


def with_lse(plan: SoftmaxPlan, x: Inputs, out: Array, logs: Any) -> Array:
    """out, with lse behind its channels; logs: one array, or a list of those of each sequence."""
    if not plan.lse:
        return out
    xp, shape = plan.xp, (*out.shape[:-1], 1)
    if isinstance(logs, list):
        rows = [heads.join(xp, y, (*out.shape[:-3], y.shape[-2], *shape[-2:])) for y in logs if y is not None]
        logs = xp.concat(rows, axis=-3) if rows else xp.zeros(shape, dtype=plan.dtype, device=device(out))
    low = xp.where(logs == float("inf"), -logs, logs)  # no key is read: the sum is 0
    return xp.concat([cast(xp, out, plan.dtype), xp.reshape(low, shape)], axis=-1)


def apart(plan: SoftmaxPlan, dout: Array | None) -> tuple[Array | None, Array | None]:
    """(gradient of out, of lse (..., T, heads, 1) or None)."""
    return (dout, None) if dout is None or not plan.lse else (dout[..., :-1], dout[..., -1:])
