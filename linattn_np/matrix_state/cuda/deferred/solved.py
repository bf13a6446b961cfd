"""The systems of a SOLVED read-out on deferred arrays: one token, by a kernel of their own (token/solve.cu)."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from ....ops.conjugate_gradients import square_of
from ....runtime.arrays import Array
from ....runtime.cuda import launch
from ....runtime.cuda.deferred import Deferred, Unsupported, given
from ....runtime.cuda.fusion import materialise
from ... import policy
from ...types import Plan
from .. import arguments

FILE = "token/solve.cu"


def unsupported_reason(K: int) -> str | None:
    """Why the kernel does not solve systems of K unknowns; None if it does."""
    if K > policy.SOLVE_THREADS or shared_bytes(K) + 4096 > launch.shared_limit():
        return f"a matrix of {K} x {K} does not fit the shared memory of a block"
    return None


def shared_bytes(K: int) -> int:
    """Bytes of a matrix."""
    return 4 * K * (K | 1)


def _launched(xp: Any, rows: dict[str, Array | None], solver: Any, end: Array) -> Array:
    """x (..., 1, H, K); Z after the token is written to `end`, which may be Z before it.

    rows: dense float32 arrays q, k, ridge (..., 1, H, K), g or None, beta (..., 1, H, 1), start (..., H, K, K) or None.
    """
    q: Any = rows["q"]
    K, x = q.shape[-1], xp.empty(q.shape, dtype=q.dtype)
    pointers = rows | {"x": x, "end": end}
    fields: dict[str, Any] = {n: 0 if y is None else y.data.ptr for n, y in pointers.items()}
    fields["enough"] = square_of(solver.tolerance, float(np.finfo(np.float32).eps))
    constants = (("LA_ITERATIONS", 0 if solver.exact else solver.iterations), ("LA_K", K))
    launch.launch(FILE, "solve", constants, prod(q.shape[:-1]), policy.SOLVE_THREADS, shared_bytes(K),
                  arguments.SOLVE.packed(fields), tuple(pointers.values()))  # fmt: skip
    return x


def solve(x: Any, plan: Plan, Z: Deferred | None) -> tuple[Deferred, Any]:
    """(x_t, Z after the token); x: SolvedInputs. The numbers of ridge are not looked at, which would wait."""
    xp, (*lead, T, H, _), K = plan.xp, x.v.shape, x.k.shape[-1]
    if T != 1 or x.q.shape[-2] > H or unsupported_reason(K) is not None:
        raise Unsupported("systems of several tokens, or of more queries than states")
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
    x_t = _launched(xp.library, {"start": None} | found, x.solver, end)
    return given(xp, x_t), Z if is_mine else given(xp, end)


def _dense(xp: Any, y: Deferred, shape: tuple[int, ...]) -> Deferred:
    """y in float32, broadcast to a shape or with each head repeated, in C order."""
    y = xp.astype(y, np.float32)
    if len(shape) > 2 and 1 < y.shape[-2] < shape[-2]:
        y = xp.repeat(y, shape[-2] // y.shape[-2], axis=-2)
    y = xp.broadcast_to(y, shape)
    return y if y.real is not None and y.real.flags.c_contiguous else xp.copy(y)
