"""The linear system of deltaformer by products of warps on CuPy arrays (readouts/deltaformer.py has the equations).

    (1 + diag(beta) P) u = v

A block of threads solves for a block of tokens of a head, and waits for the earlier blocks that it reads. Backward
solves the transposed system; the other gradients are the gradients of attention of w on earlier tokens with the values
u.
"""

from __future__ import annotations

from typing import Any

from ...ops.cuda.arguments import address, rows_of
from ...runtime.arrays import Array, cast
from ...runtime.cuda import launch
from ...runtime.cuda.elements import BYTES
from ..types import DeltaInputs, Inputs, SoftmaxPlan
from . import arguments, calls, portable
from .calls import SavedLogs
from .portable import ARRAYS, POINTERS, PortableCall
from .system_plan import KERNELS, block_rows, constants

BEGIN = 128  # threads of a block of `system_begin`
Results = tuple[Array, Array, SavedLogs]  # u, r (..., T, H, V), the log2 of the sums and the sums of gates


def unsupported_reason(x: DeltaInputs, plan: SoftmaxPlan) -> str | None:
    """Why the kernels do not support a call; None if they do."""
    if plan.has_state:
        return "a system that goes on from a cache is solved by array calls"
    return portable.unsupported_reason(Inputs(x.k if x.w is None else x.w, x.k, x.v, x.g), plan)


def forward(plan: SoftmaxPlan, x: Inputs, beta: Array) -> tuple[Array, Results]:
    """(u (..., T, H, V), residuals); x has the queries w and the values v."""
    xp, call = plan.xp, portable.call_of(plan, x, None)
    _prepare(call, ("forward", "backward")[: 1 + plan.gradients])
    u, shape = _padded(xp, call), (*call.batch.lead, call.batch.T, call.batch.heads, call.kind.V)
    r = xp.empty(shape, dtype=call.x.v.dtype) if plan.gradients else None
    logs = xp.empty((call.batch.rows, call.batch.heads, call.batch.T), dtype=xp.float32)
    sums, readers = calls.strict_decays(plan, call.batch, x.g)
    saved = SavedLogs(logs, sums, readers=readers)
    fields = portable.fields_of(plan, call, r) | {"logs": logs, "sums": sums, "readers": readers}
    _launch("forward", plan, call, fields, {"beta": _strengths(plan, beta), "dbeta": None, "solved": u})
    return u[..., : call.kind.V].reshape(shape), (u, r, saved)


def backward(plan: SoftmaxPlan, x: Inputs, beta: Array, results: Results, du: Array) -> tuple[Inputs, Array, None]:
    """(gradients of w, k, v and g, of beta, of no cache)."""
    xp, (u, r, saved) = plan.xp, results
    call = portable.call_of(plan, x, None, cast(xp, du, x.v.dtype))
    d, dv = _padded(xp, call), xp.empty((call.batch.rows, *x.v.shape[-3:]), dtype=x.v.dtype)
    dbeta = xp.empty(beta.shape, dtype=xp.float32)
    fields = portable.fields_of(plan, call, r) | {"logs": saved.logs, "sums": saved.sums, "readers": saved.readers}
    fields |= {"dout": call.cotangents[0], "dv": dv}
    _launch("backward", plan, call, fields, {"beta": _strengths(plan, beta), "dbeta": dbeta, "solved": d})
    u, d = (y[..., : call.kind.V].reshape(x.v.shape) for y in (u, d))
    found = portable.backward(plan, x._replace(v=u), r, saved, d)
    return found._replace(v=dv.reshape(x.v.shape)), dbeta, None


def _padded(xp: Any, call: PortableCall) -> Array:
    """Rows like the values', of a multiple of 16 bytes."""
    per = 16 // BYTES[call.kind.element]
    shape = call.batch.rows, call.batch.T, call.batch.heads, -(-call.kind.V // per) * per
    return xp.empty(shape, dtype=call.x.v.dtype)


def _strengths(plan: SoftmaxPlan, beta: Array) -> Array:
    return plan.xp.ascontiguousarray(cast(plan.xp, beta, plan.xp.float32))


def _prepare(call: PortableCall, names: tuple[str, ...]) -> None:
    """Start compiling."""
    wanted = tuple((KERNELS[n].file, constants(n, call.kind, launch.shared_limit())) for n in names)
    launch.prepare(wanted, launch.capability())


def _launch(name: str, plan: SoftmaxPlan, call: PortableCall, fields: dict[str, Any], own: dict[str, Any]) -> None:
    """Two launches: no block is solved; the kernel."""
    batch, limit = call.batch, launch.shared_limit()
    pairs = batch.sequences * batch.heads
    counts = plan.xp.empty(pairs, dtype=plan.xp.int32)
    given = {n: rows_of(fields[n], batch.heads) for n in ARRAYS} | {n: address(fields[n]) for n in POINTERS}
    packed = arguments.SYSTEM.pack(
        of=arguments.PORTABLE.flat(fields | given), beta=address(own["beta"]), dbeta=address(own["dbeta"]),
        solved=rows_of(own["solved"], batch.heads), counts=address(counts))  # fmt: skip
    kernel, built, rows = KERNELS[name], constants(name, call.kind, limit), block_rows(name, call.kind, limit)
    named, shared = (*(fields[n] for n in (*ARRAYS, *POINTERS)), *own.values(), counts), dict(built)["LA_SHARED"]
    launch.launch(kernel.file, "system_begin", built, -(-pairs // BEGIN), BEGIN, 0, packed, named)
    blocks = pairs * -(-call.longs // rows)
    launch.launch(kernel.file, kernel.entry, built, blocks, kernel.threads * rows // 16, shared, packed, named)
