"""The systems of a SOLVED read-out by kernels of a chunk (cuda_src/systems): K up to 128, conjugate gradients.

Two launches: states.cu has the matrix before each chunk, one chunk after the other, in float32; iterate.cu solves for
all tokens of all chunks at once. The adjoint is the same two launches with the transposed initial state.
"""

from __future__ import annotations

from math import prod
from typing import Any

from ....ops.conjugate_gradients import square_of
from ....ops.cuda.arguments import NO_ROWS, address, rows_of
from ....runtime.arrays import Array, cast, name_of
from ....runtime.cuda import launch
from ... import policy
from ...types import Plan
from .. import arguments
from ..arguments import gate_of
from ..operands import alignment, dense_rows
from .plan import TERMS, SystemsKernels, kernels_of


def takes(x: Any, plan: Plan) -> bool:
    """Whether the kernels solve the systems of a call. x: SolvedInputs."""
    return unsupported_reason(x, plan) is None


def unsupported_reason(x: Any, plan: Plan) -> str | None:
    """Why the kernels do not solve the systems of a call; None where they do. x: SolvedInputs."""
    if x.q is None or 0 in (*x.v.shape, *x.k.shape):
        return "there is nothing to solve"
    if x.solver.exact and not (x.solver.free and _element(x, plan) in ("bfloat16", "float16")):
        return "the kernels of chunks iterate; the default of 16-bit arrays, else solver='conjugate_gradients'"
    if plan.dtype != plan.xp.float32 or plan.chunk_size is not None or plan.states_at is not None:
        return "the kernels of chunks compute in float32, choose their own chunks and store no states at positions"
    if plan.pool_rows is not None or plan.neighbours is not None:
        return "the kernels of chunks take dense initial states"
    if (why := launch.unusable()) is not None:
        return why
    if kernels_of(x.k.shape[-1], _element(x, plan), True, launch.shared_limit()) is None:
        return f"matrices of {x.k.shape[-1]} x {x.k.shape[-1]} do not fit a block of the kernels of chunks"
    return None


def _element(x: Any, plan: Plan) -> str:
    """What products are made of."""
    given = "float32" if x.solver.dtype is None else name_of(x.solver.dtype)
    given = given if given in TERMS else "float32"  # of a plan for float64 arrays cast to float32
    return "tf32" if given == "float32" and plan.precision == "tf32" else given


def stored(x: Any) -> Any:
    """The dtype that the kernels of the memories round their factors to, as all factors of a bfloat16 call; or None."""
    given = x.solver.dtype
    return None if given is None or name_of(given) != "bfloat16" else given


def solve(x: Any, plan: Plan, Z: Array | None) -> tuple[Array, Array]:
    """(x_t, Z after the last token).   The numbers of ridge are not looked at, which would wait for the device."""
    xp, (*lead, T, H, _), K = plan.xp, x.v.shape, x.k.shape[-1]
    q, k = (dense_rows(xp, cast(xp, y, xp.float32)) for y in (x.q, x.k))
    g, beta, ridge = (cast(xp, y, xp.float32) for y in (x.g, x.beta, x.ridge))
    ridge = xp.ascontiguousarray(ridge)
    heads, ragged, ends = max(q.shape[-2], H), plan.is_ragged, [s.stop for s in plan.sequences]
    N = len(ends) if ragged else prod(lead)
    offsets = xp.asarray([0, *ends], dtype=xp.int64) if ragged else None
    pairs = K % 2 == 0 and alignment((q, k, ridge), K, K) >= 8
    found = kernels_of(K, _element(x, plan), pairs, launch.shared_limit())
    if found is None:
        raise RuntimeError("a block of the systems' kernels does not fit the device")
    chunks = -(-T // found.C)
    slots = T // found.C + N if ragged else N * chunks
    start = None if Z is None else xp.ascontiguousarray(cast(xp, Z, xp.float32))
    shape = (N, H, K, K) if ragged else (*lead, H, K, K)
    states, end = xp.empty((slots, H, K, K), dtype=xp.float32), xp.empty(shape, dtype=xp.float32)
    solution = xp.empty((*lead, T, heads, K), dtype=xp.float32)
    common: dict[str, Any] = {
        "offsets": address(offsets), "states": address(states), "T": T, "sequences": N, "chunks": chunks,
        "group": heads // H, "iterations": _most(x, K), "enough": square_of(x.solver.tolerance, found.eps),
        "g": gate_of(g, H), "beta": gate_of(beta, H),
    }  # fmt: skip
    none = dict.fromkeys(("q", "ridge", "x"), NO_ROWS) | {"start": 0, "end": 0}
    ends_of = {"start": address(start), "end": address(end), "k": rows_of(k, H), "heads": H}
    both = [y for y in (k, g, beta, states, offsets) if y is not None]
    found.states.launch(N * H * found.states.parts, arguments.SYSTEMS.packed(common | none | ends_of),
                        (*both, end) if start is None else (*both, end, start))  # fmt: skip
    token = 4 * K * ridge.shape[-2]
    strides = token * T if ridge.ndim > 3 else 0, token if ridge.shape[-3] > 1 else 0
    rows = {"q": rows_of(q, heads), "k": rows_of(k, heads), "x": rows_of(solution, heads), "heads": heads,
            "ridge": (ridge.data.ptr, *strides, 4 * K, heads // ridge.shape[-2])}  # fmt: skip
    found.iterate.launch(slots * heads, arguments.SYSTEMS.packed(common | none | rows), (*both, q, ridge, solution))
    return solution, end


def _most(x: Any, K: int) -> int:
    """The most steps of a row."""
    return policy.SYSTEM_STEPS * K if x.solver.exact else x.solver.iterations


def how(x: Any, plan: Plan) -> str:
    """The solver of a call that is covered, in words."""
    found: SystemsKernels | None = kernels_of(x.k.shape[-1], _element(x, plan), True, launch.shared_limit())
    C = "" if found is None else f" of {found.C} tokens"
    return f"systems by at most {_most(x, x.k.shape[-1])} steps of conjugate gradients, a kernel for chunks{C}"
