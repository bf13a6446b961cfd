"""Decays of the key and of the value channels in portable chunks: S_t = diag(e^g) S_{t-1} diag(e^gv) + k_t^T v_t.

One kernel, portable/values.cu, in four passes. Outputs and states; dv and dgv from the last chunk to the first. On the
transposed state, whose keys are v and whose values are k, the queries dout read dq; with the cotangent q the way back
has dk and dg.
"""

from __future__ import annotations

from typing import Any

from ....core import StatesAt
from ....runtime.arrays import Array, cast, shared_heads
from ...types import Decay, Erase, Inputs, Plan, ReadState, Saved
from ..operands import element_of, shaped
from . import calls, segments
from . import plan as cuts
from .launch import PortableBatch, batch_of, dense, run

NARROW, LEAST_ALIGNMENT = 16, 8  # more channels, and bytes; 33 keys and 7 values in float32 fault on a GPU


def unsupported_reason(x: Inputs, plan: Plan) -> str | None:
    """Why the kernels do not cover a call; None where they do."""
    if x.gv is None or x.decay is not Decay.VECTOR or x.erase is not Erase.NONE:
        return "the kernels are of decays of the key and of the value channels, without an erase term"
    if x.u is not None or plan.query_reads is not ReadState.UPDATED:
        return "the kernels of decays of both axes read a token's own write, without a bonus"
    if x.q is not None and max(x.q.shape[-2], x.k.shape[-2], x.g.shape[-2], x.gv.shape[-2]) > x.v.shape[-2]:
        return "there are more heads of queries, keys or decays than of values"
    widths = x.k.shape[-1], x.v.shape[-1]
    size = 4 if element_of(x) == "float32" else 2
    if min(widths) <= NARROW or any(n * size % LEAST_ALIGNMENT for n in widths):
        return "the kernels of decays of both axes need more than 16 channels, in rows of a multiple of 8 bytes"
    return calls.unsupported_reason(x._replace(gv=None), plan)


def unsupported_gradients(x: Inputs, plan: Plan) -> str | None:
    """Why the kernels do not cover the gradients of a call; None where they do."""
    return unsupported_reason(x, plan) or calls.unsupported_gradients(x._replace(gv=None), plan)


def how(x: Inputs, plan: Plan) -> str:
    """The kernels of a call that is covered, in words."""
    return f"{calls.how(x, plan)}, decayed along both axes"


def handles(x: Inputs, plan: Plan) -> frozenset[str]:
    """The preprocessing steps that the kernels include."""
    return frozenset()


def forward(x: Inputs, plan: Plan, state: Array | None) -> tuple[Array, Array, Saved]:
    """(out, final state, saved): the steps of dgv, and the states at marks."""
    xp, batch = plan.xp, _batch_of(x, plan)
    out, end, saved = _outputs(plan, batch, dense(xp, state), plan.gradients)
    return cast(xp, out.reshape(x.v.shape), x.v.dtype), end, Saved(x, plan, state, saved)


def backward(saved: Saved, dout: Array | None, dstate: Any) -> tuple[Inputs, Array]:
    """Gradients of every input and of the initial state."""
    x, plan, state, given = saved
    xp = plan.xp
    if isinstance(dstate, StatesAt):
        dstate = dstate.end
    dout = xp.zeros(x.v.shape, dtype=x.v.dtype) if dout is None else cast(xp, dout, x.v.dtype)
    q, k = (shared_heads(xp, y, x.v.shape[-2]) for y in (x.q, x.k))
    batch, other = _batch_of(x, plan, dout), _batch_of(Inputs(dout, x.v, k, x.gv, x.g), plan, q)
    state, dstate = dense(xp, state), dense(xp, dstate)
    given = given or _outputs(plan, batch, state, True)[2]
    dq, _, across = _outputs(plan, other, _exchanged(xp, state), True)
    dv, dgv, first = _gradients(plan, batch, given, dstate)
    dk, dg, _ = _gradients(plan, other, across, _exchanged(xp, dstate))
    each = {"q": dq, "k": dk, "v": dv, "g": dg, "gv": dgv}
    grads = {n: shaped(xp, d.reshape(*x.v.shape[:-1], -1), getattr(x, n)) for n, d in each.items()}
    return Inputs(**dict.fromkeys(Inputs._fields) | grads), first


def _batch_of(x: Inputs, plan: Plan, dout: Array | None = None) -> PortableBatch:
    """The call; of copies where a view's rows are not aligned."""
    batch = batch_of(x, plan, dout)
    if batch.kind.align >= LEAST_ALIGNMENT:
        return batch
    copies = Inputs(*(None if y is None else y.copy() for y in x))
    return batch_of(copies, plan, None if dout is None else dout.copy())


def _outputs(plan: Plan, batch: PortableBatch, start: Array | None, marked: bool) -> tuple[Array, Array, Any]:
    """(out, final state, what the way back reads: out without a token's own value, states at marks)."""
    xp, V, shape, made = plan.xp, batch.kind.V, batch.shape, batch.arrays
    made["out"], made["error"] = batch.empty(xp, V, made["v"].dtype), None
    pieces, start = _in_segments(xp, batch, start)
    (N, _, heads), marks = pieces.sizes, None
    if marked:
        pieces.arrays["error"] = batch.empty(xp, V, xp.float32)
        marks = xp.empty((N * heads, -(-pieces.longest // cuts.MARK), *shape[-2:]), dtype=xp.float32)
    end = xp.empty(pieces.shape, dtype=xp.float32)
    run("values", pieces, start=start, end=end, marks=marks)
    end = end if pieces is batch else segments.outer(batch, end, True).reshape(shape)
    return made["out"], end, (pieces.arrays["error"], marks) if marked else None


def _gradients(plan: Plan, batch: PortableBatch, given: Any, start: Array | None) -> tuple[Array, Array, Array]:
    """(dv, dgv, gradient of the first state) of a batch with dout."""
    xp, V, shape, made = plan.xp, batch.kind.V, batch.shape, batch.arrays
    made["dv"], made["dg"] = batch.empty(xp, V, made["v"].dtype), None
    pieces, start = _in_segments(xp, batch, start, True)
    pieces.arrays["dg"], pieces.arrays["error"] = batch.empty(xp, V, made["gv"].dtype), given[0]
    first = xp.empty(pieces.shape, dtype=xp.float32)
    run("values", pieces, True, start=start, end=first, marks=given[1])
    first = first if pieces is batch else segments.outer(batch, first, False).reshape(shape)
    return made["dv"], pieces.arrays["dg"], first


def _in_segments(
    xp: Any, batch: PortableBatch, state: Array | None, back: bool = False
) -> tuple[PortableBatch, Array | None]:
    """(the call, in segments if it is cut, the states before them, or the gradients after them)."""
    pieces = segments.cut(xp, batch)
    if pieces is None:
        return batch, state
    return pieces, segments.begins(xp, pieces, segments.transfers(xp, pieces), state, back)


def _exchanged(xp: Any, state: Array | None) -> Array | None:
    """S^T of S, and back."""
    return None if state is None else xp.ascontiguousarray(xp.swapaxes(state, -1, -2))
