"""The systems of a SOLVED read-out for one token, by a kernel of their own (token/solve.cu)."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from ....ops.conjugate_gradients import square_of
from ....runtime.arrays import Array, cast
from ....runtime.cuda import launch
from ... import policy
from ...types import Plan
from .. import arguments

FILE = "token/solve.cu"


def takes(x: Any, plan: Plan) -> bool:
    """Whether the kernel solves the systems of a call: of one token, in float32. x: SolvedInputs."""
    if x.q is None or x.v.shape[-3] != 1 or plan.is_ragged or plan.states_at is not None or 0 in x.v.shape:
        return False
    few = x.q.shape[-2] <= x.v.shape[-2] and plan.dtype == plan.xp.float32
    return few and unsupported_reason(x.k.shape[-1]) is None and launch.unusable() is None


def unsupported_reason(K: int) -> str | None:
    """Why the kernel does not solve systems of K unknowns; None if it does."""
    if not 0 < K <= policy.SOLVE_THREADS or shared_bytes(K) + 4096 > launch.shared_limit():
        return f"a matrix of {K} x {K} does not fit the shared memory of a block"
    return None


def stored(x: Any) -> Any:
    """The dtype that the memories' kernels round their factors to: none."""


def shared_bytes(K: int) -> int:
    """Bytes of a matrix."""
    return 4 * K * (K | 1)


def solve(x: Any, plan: Plan, Z: Array | None) -> tuple[Array, Array]:
    """(x_t, Z after the token), which is Z itself if the plan allows overwriting.

    The numbers of ridge are not looked at, which would wait for the device.
    """
    xp, (*lead, _, H, _), K = plan.xp, x.v.shape, x.k.shape[-1]
    shapes = dict.fromkeys(("q", "k", "ridge"), (*lead, 1, H, K)) | dict.fromkeys(("g", "beta"), (*lead, 1, H, 1))
    rows = {name: _dense(xp, getattr(x, name), shape) for name, shape in shapes.items()}
    start = None if Z is None else _dense(xp, Z, (*lead, H, K, K))
    end = start if plan.overwrite and start is Z and Z is not None else xp.empty((*lead, H, K, K), dtype=xp.float32)
    solution = xp.empty((*lead, 1, H, K), dtype=xp.float32)
    pointers = rows | {"start": start, "x": solution, "end": end}
    fields: dict[str, Any] = {n: 0 if y is None else y.data.ptr for n, y in pointers.items()}
    fields["enough"] = square_of(x.solver.tolerance, float(np.finfo(np.float32).eps))
    constants = (("LA_ITERATIONS", 0 if x.solver.exact else x.solver.iterations), ("LA_K", K))
    launch.launch(FILE, "solve", constants, prod(lead) * H, policy.SOLVE_THREADS, shared_bytes(K),
                  arguments.SOLVE.packed(fields), tuple(pointers.values()))  # fmt: skip
    return solution, end


def _dense(xp: Any, y: Array, shape: tuple[int, ...]) -> Array:
    """y in float32, broadcast to a shape or with each head repeated, in C order."""
    y = cast(xp, y, xp.float32)
    if len(shape) > 2 and 1 < y.shape[-2] < shape[-2]:
        y = xp.repeat(y, shape[-2] // y.shape[-2], axis=-2)
    return xp.ascontiguousarray(xp.broadcast_to(y, shape))


def how(x: Any, plan: Plan) -> str:
    """The solver of a call that is covered, in words."""
    solver = x.solver
    words = "formed and factored" if solver.exact else f"formed, and solved by at most {solver.iterations} steps"
    return f"every system is {words}, in a kernel for one token"
