"""The systems of a SOLVED read-out for one token, as one kernel on CuPy arrays (step/solve.cu)."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from ...ops.conjugate_gradients import square_of
from ...runtime.arrays import Array
from ...runtime.cuda import launch
from . import arguments

FILE = "step/solve.cu"
THREADS = 256


def unsupported_reason(K: int) -> str | None:
    """Why the kernel does not solve systems of K unknowns; None if it does."""
    if K > THREADS or shared_bytes(K) + 4096 > launch.shared_limit():
        return f"a matrix of {K} x {K} does not fit the shared memory of a block"
    return None


def shared_bytes(K: int) -> int:
    """Bytes of a matrix."""
    return 4 * K * (K | 1)


def solve(xp: Any, rows: dict[str, Array | None], solver: Any, end: Array) -> Array:
    """x (..., 1, H, K); Z after the token is written to `end`, which may be Z before it.

    rows: dense float32 arrays q, k, ridge (..., 1, H, K), g or None, beta (..., 1, H, 1), start (..., H, K, K) or None.
    """
    q: Any = rows["q"]
    K, x = q.shape[-1], xp.empty(q.shape, dtype=q.dtype)
    pointers = rows | {"x": x, "end": end}
    fields: dict[str, Any] = {n: 0 if y is None else y.data.ptr for n, y in pointers.items()}
    fields["enough"] = square_of(solver.tolerance, float(np.finfo(np.float32).eps))
    constants = (("LA_ITERATIONS", 0 if solver.exact else solver.iterations), ("LA_K", K))
    launch.launch(FILE, "solve", constants, prod(q.shape[:-1]), THREADS, shared_bytes(K),
                  arguments.SOLVE.packed(fields), tuple(pointers.values()))  # fmt: skip
    return x
