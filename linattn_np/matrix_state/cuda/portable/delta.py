"""The delta rule as portable CUDA kernels (mma.sync): every dtype but float64, K and V up to 256, any alignment.

Forward: T_inv of every chunk (delta_inverse.cu), then the scan over chunks (delta_scan.cu). Backward: the scan again,
for the new values of each chunk and the state before it, and a reverse scan for dv and the gradient of the state after
it (delta_scan_reverse.cu); given both, the other gradients of a chunk depend on no other chunk (delta_scan_grads.cu).
Where batch and heads leave multiprocessors idle, sequences are cut into segments: scans without outputs compute the
offset and the transfer matrix of each, delta_scan_segments.cu its initial state (backward: its final gradient).
"""

from __future__ import annotations

from math import prod
from typing import Any

from ....ops.cuda.arguments import address, rows_of
from ....ops.product import decayed
from ....ops.sums import added, inner, row_inner, sum_to
from ....runtime.arrays import Array, cast
from ....runtime.cuda import launch
from ... import policy
from ...policy import saves_factors
from ...types import Decay, Inputs, Plan, ReadState, Saved
from .. import arguments, operands, shared_memory
from ..arguments import NO_STATES, States, gate_of
from . import delta_plan as cuts
from .delta_launch import PortableDeltaBatch, batch_of, cotangent_of, launch_chain
from .delta_plan import ADDS, WRITES, too_large


def unsupported_reason(x: Inputs, plan: Plan) -> str | None:
    """Why the kernels do not cover a call with erase DELTA; None where they do."""
    if not plan.xp.__name__.endswith("cupy"):
        return "the arrays are not CuPy arrays"
    if x.decay is Decay.VECTOR:
        return "the kernels of the delta rule cover decay NONE and SCALAR so far"
    if not plan.erases_key and x.r.shape[-2] != x.k.shape[-2]:
        return "the kernels of the delta rule read with the key itself, or with as many heads as keys"
    if _decays(x, plan) and x.g.shape[-2] != x.r.shape[-2]:
        return "erase vectors of their own that read the decayed state have a log decay each"
    if x.q is None or not plan.causal or plan.query_reads is not ReadState.UPDATED:
        return "the kernels write and read in one pass, each token after its own write; this call does not"
    if plan.dtype == plan.xp.float64:
        return "float64 is computed by the chunk form in CuPy"
    if plan.chunk_size not in (None, policy.GROUP_CHUNK):
        return f"chunk_size={plan.chunk_size!r}: the kernels choose their own chunks"
    if why := operands.unsupported_reason(x):
        return why
    K, V, separate = x.k.shape[-1], x.v.shape[-1], not plan.erases_key
    element = operands.common_element(x.q, x.k, x.v, x.r)
    return too_large(element, K, V, launch.shared_limit(), separate)


unsupported_gradients = unsupported_reason


def how(x: Inputs, plan: Plan) -> str:
    """The kernels of a call that is covered, in words."""
    return "portable chains of chunks (mma.sync)"


def handles(x: Inputs, plan: Plan) -> frozenset[str]:
    """The preprocessing steps that the kernels include."""
    return frozenset()


def forward(x: Inputs, plan: Plan, state: Array | None) -> tuple[Array, Array, Saved]:
    """(out, final state, saved): T_inv of the chunks; initial states and transfer matrices of the segments."""
    given, given_plan = x, plan
    x, plan = _before(x, plan)
    xp, batch = plan.xp, batch_of(x, plan)
    limit = launch.shared_limit()
    wanted = cuts.passes(batch.kind, limit, plan.gradients)
    launch.prepare(tuple((how.file, how.constants) for how in wanted.values()), launch.capability())
    out = xp.empty((*batch.lead, batch.T, batch.heads, batch.V), dtype=batch.v.dtype)
    end = xp.empty((batch.N, batch.H, batch.K, batch.V), dtype=xp.float32)
    start = operands.states_at(operands.as_state(xp, state, batch), batch, batch.group)
    inverses = _inverses(xp, batch)
    begins, transfers = _begins(xp, batch, inverses, start)
    last = operands.states_at(end, batch, batch.group)
    launch_chain(
        batch, cuts.chain_pass(batch.kind, limit), inverses, begins or start, last, v=batch.v, out=out, scale=plan.scale
    )
    stored = inverses if plan.gradients and saves_factors(inverses.nbytes) else None
    saved = Saved(given, given_plan, state, {"inverses": stored, "begins": begins, "transfers": transfers})
    return cast(xp, out, x.v.dtype), operands.public_state(end, batch), saved


def backward(saved: Saved, dout: Array | None, dstate: Array | None) -> tuple[Inputs, Array]:
    """Gradients of every input and of the initial state; d.k includes the gradient of k as erase vector."""
    given, given_plan, state, residuals = saved
    x, plan = _before(given, given_plan)
    xp, batch, limit = plan.xp, batch_of(x, plan), launch.shared_limit()
    kind, dtype = batch.kind, batch.v.dtype
    shape = (prod(batch.lead), batch.T, batch.heads)
    dout = cotangent_of(xp, batch, dout, shape)
    start = operands.states_at(operands.as_state(xp, state, batch), batch, batch.group)
    last = operands.states_at(operands.one_head_each(xp, operands.as_state(xp, dstate, batch), batch), batch)
    residuals = residuals or dict.fromkeys(("inverses", "begins", "transfers"))
    inverses, begins, transfers = (residuals[n] for n in ("inverses", "begins", "transfers"))
    inverses = _inverses(xp, batch) if inverses is None else inverses
    if begins is None:
        begins, transfers = _begins(xp, batch, inverses, start)
    new_values, dv = (xp.empty((*shape, batch.V), dtype=dtype) for _ in range(2))
    over_beta = xp.empty(dv.shape, dtype=dtype) if kind.element == "float16" else None
    first = xp.empty((batch.N, batch.heads, batch.K, batch.V), dtype=xp.float32)
    bytes_of = shared_memory.delta_state(kind)
    states, ends = (xp.empty((batch.slots * batch.heads, bytes_of), dtype=xp.int8) for _ in range(2))
    launch_chain(
        batch,
        cuts.chain_pass(kind, limit, what=WRITES),
        inverses,
        begins or start,
        NO_STATES,
        v=batch.v,
        writes=new_values,
        states=states,
        scale=plan.scale,
    )
    later = _ends(xp, batch, inverses, transfers, dout, last, plan.scale) or last
    launch_chain(
        batch,
        cuts.chain_pass(kind, limit, reverse=True),
        inverses,
        later,
        operands.states_at(first, batch),
        v=dout,
        out=dv,
        writes=over_beta,
        states=ends,
        scale=plan.scale,
    )
    del inverses, begins, transfers, later, residuals
    rows = {"dout": dout, "dv": dv if over_beta is None else over_beta, "new_values": new_values}
    grads, gates = _grads(xp, batch, rows, states, ends, plan.scale)
    grads = {n: operands.sum_shared_heads(xp, y, (*shape[:2], *getattr(x, n).shape[-2:])).reshape(getattr(x, n).shape)
             for n, y in (grads | {"v": dv}).items()}  # fmt: skip
    for n, y in gates.items():
        like = getattr(x, n)
        y = operands.sum_shared_heads(xp, y[..., None], (*shape[:2], *like.shape[-2:]))
        grads[n] = sum_to(xp, y.reshape((*batch.lead, *like.shape[-3:])), like.shape)
    if _decays(given, given_plan):
        grads |= _before_vjp(given, x.r, plan, grads)
    return Inputs(**{n: grads.get(n) for n in Inputs._fields}), operands.public_state_gradient(xp, first, batch)


def _decays(x: Inputs, plan: Plan) -> bool:
    """Whether erase vectors of their own read a state that has decayed."""
    return not plan.erases_key and plan.erase_reads is ReadState.DECAYED and x.g is not None


def _before(x: Inputs, plan: Plan) -> tuple[Inputs, Plan]:
    """The call whose own erase vectors read the state before its decay: r_t e^{g_t} S_{t-1} = (e^{g_t} r_t) S_{t-1}."""
    if plan.erases_key or plan.erase_reads is not ReadState.DECAYED:
        return x, plan
    before = plan._replace(erase_reads=ReadState.PREVIOUS)
    if x.g is None:
        return x, before
    return x._replace(r=decayed(plan.xp, x.r, x.g, plan.dtype)), before


def _before_vjp(x: Inputs, r: Array, plan: Plan, grads: dict[str, Array]) -> dict[str, Array]:
    """dr = e^g dr', dg = dg' + <r', dr'> from the gradients dr', dg' of the call with r' = e^g r."""
    xp, dr, dg = plan.xp, grads["r"], grads["g"]
    if dg.shape[:-1] == dr.shape[:-1]:
        dg = inner(xp, r, dr, dg[..., 0], None, plan.dtype)[..., None]
    else:
        dg = added(xp, dg, sum_to(xp, row_inner(xp, r, dr, plan.dtype)[..., None], x.g.shape))
    return {"r": decayed(xp, dr, x.g, plan.dtype), "g": dg}


def _inverses(xp: Any, batch: PortableDeltaBatch) -> Array:
    """T_inv of every chunk."""
    how, size = cuts.inverse_pass(batch.kind), shared_memory.delta_inverse_bytes(batch.kind.element)
    inverses = xp.empty((batch.slots * batch.heads, size), dtype=xp.int8)
    launch_chain(batch, how, inverses, NO_STATES, NO_STATES, segments=batch.chunks_longest, chunks=1)
    return inverses


def _of_segments(xp: Any, batch: PortableDeltaBatch, rows: int) -> States:
    """A matrix (rows, K) for every segment, sequence and head."""
    array = xp.empty((batch.N * batch.heads * batch.segments, rows, batch.K), dtype=xp.float32)
    return States(array, rows * batch.K, batch.K, 1)


def _begins(xp: Any, batch: PortableDeltaBatch, inverses: Array, start: States) -> tuple[States | None, States | None]:
    """(initial state, transfer matrix) of each segment; None without segments."""
    if batch.segments == 1:
        return None, None
    added, transfers = _of_segments(xp, batch, batch.V), _of_segments(xp, batch, batch.K)
    how = cuts.chain_pass(batch.kind, launch.shared_limit(), what=ADDS)
    launch_chain(batch, how, inverses, start, added, v=batch.v, transfers=transfers)
    return _sum_up(xp, batch, added, transfers, start, False), transfers


def _ends(
    xp: Any,
    batch: PortableDeltaBatch,
    inverses: Array,
    transfers: States | None,
    dout: Array,
    last: States,
    scale: float,
) -> States | None:
    """The gradient of the final state of each segment."""
    if batch.segments == 1 or transfers is None:
        return None
    added = _of_segments(xp, batch, batch.V)
    how = cuts.chain_pass(batch.kind, launch.shared_limit(), True, ADDS)
    launch_chain(batch, how, inverses, last, added, v=dout, scale=scale)
    return _sum_up(xp, batch, added, transfers, last, True)


def _sum_up(
    xp: Any, batch: PortableDeltaBatch, added: States, transfers: States, start: States, reverse: bool
) -> States:
    """Initial states of the segments from their offsets and transfer matrices, by delta_scan_segments.cu."""
    begins = _of_segments(xp, batch, batch.V)
    how = cuts.segments_pass(batch.kind, reverse)
    packed = arguments.DELTA_SEGMENTS.pack(
        offsets=address(batch.offsets), added=address(added.array), transfers=address(transfers.array),
        begins=address(begins.array), start=start.values(), start_group=start.group, T=batch.T, heads=batch.heads,
        segments=batch.segments, chunks=batch.chunks)  # fmt: skip
    how.launch(
        batch.N * batch.heads * how.parts,
        packed,
        (batch.offsets, added.array, transfers.array, begins.array, start.array),
    )
    return begins._replace(group=0)


def _grads(
    xp: Any, batch: PortableDeltaBatch, rows: dict[str, Array], states: Array, ends: Array, scale: float
) -> tuple[dict[str, Array], dict[str, Array]]:
    """dq, dk, dr, dg and dbeta by name without the d, one per value head, by delta_scan_grads.cu."""
    heads, how = batch.heads, cuts.grads_pass(batch.kind, launch.shared_limit())
    shape = (prod(batch.lead), batch.T, heads)
    names = ("q", "k") if batch.r is None else ("q", "k", "r")
    grads = {n: xp.empty((*shape, batch.K), dtype=batch.v.dtype) for n in names}
    gates = {n: xp.empty(shape, dtype=xp.float32) for n in (("beta",) if batch.g is None else ("g", "beta"))}
    rows = rows | {"q": batch.q, "k": batch.k, "r": batch.r} | {f"d{n}": grads.get(n) for n in ("q", "k", "r")}
    packed = arguments.DELTA_GRADS.pack(
        **{n: rows_of(y, heads) for n, y in rows.items()}, g=gate_of(batch.g, heads), beta=gate_of(batch.beta, heads),
        offsets=address(batch.offsets), states=states.data.ptr, ends=ends.data.ptr, dg=address(gates.get("g")),
        dbeta=address(gates["beta"]), slots=batch.slots, T=batch.T, heads=heads, segments=batch.chunks_longest,
        unused=0, scale=scale)  # fmt: skip
    how.launch(
        batch.N * heads * batch.chunks_longest,
        packed,
        (*rows.values(), batch.g, batch.beta, batch.offsets, states, ends, *gates.values()),
    )
    return grads, gates
