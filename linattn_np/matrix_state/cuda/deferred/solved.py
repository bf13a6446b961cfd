"""The systems of a SOLVED read-out on deferred arrays: one token, by a kernel of their own."""

from __future__ import annotations

from typing import Any

import numpy as np

from ....runtime.cuda.deferred import Deferred, Unsupported, given
from ....runtime.cuda.fusion import materialise
from ...types import Plan
from .. import solve as kernel


def solve(x: Any, plan: Plan, Z: Deferred | None) -> tuple[Deferred, Deferred]:
    """(x_t, Z after the token); x: SolvedInputs. The numbers of ridge are not looked at, which would wait."""
    xp, (*lead, T, H, _), K = plan.xp, x.v.shape, x.k.shape[-1]
    if T != 1 or plan.gradients or x.q.shape[-2] > H or kernel.unsupported_reason(K) is not None:
        raise Unsupported("systems of several tokens, of more queries than states, or with gradients")
    shapes = dict.fromkeys(("q", "k", "ridge"), (*lead, 1, H, K)) | dict.fromkeys(("g", "beta"), (*lead, 1, H, 1))
    rows = {name: _dense(xp, getattr(x, name), shape) for name, shape in shapes.items()}
    if Z is not None:
        rows["start"] = _dense(xp, Z, (*lead, H, K, K))
    start = rows.get("start")
    found: dict[str, Any] = dict(zip(rows, materialise(list(rows.values())), strict=True))
    is_mine = plan.overwrite and Z is not None and start is Z
    end = found["start"] if is_mine else xp.library.empty((*lead, H, K, K), dtype=np.float32)
    if is_mine:
        xp.overwritten.append(end)
    x_t = kernel.solve(xp.library, {"start": None} | found, x.solver, end)
    return given(xp, x_t), Z if is_mine else given(xp, end)


def _dense(xp: Any, y: Deferred, shape: tuple[int, ...]) -> Deferred:
    """y in float32, broadcast to a shape or with each head repeated, in C order."""
    y = xp.astype(y, np.float32)
    if len(shape) > 2 and 1 < y.shape[-2] < shape[-2]:
        y = xp.repeat(y, shape[-2] // y.shape[-2], axis=-2)
    y = xp.broadcast_to(y, shape)
    return y if y.real is not None and y.real.flags.c_contiguous else xp.copy(y)
