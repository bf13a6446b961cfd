"""The delta rule with one decay a token and key channel, as CUDA kernels on CuPy arrays: erase DELTA, decay VECTOR.

For what vector.py covers: compute capability 90, bfloat16, K and V up to 128. What a chunk can know before it sees a
state, all chunks at once (vector/vector_inverse.cu), then the chain of the chunks (vector_chain.cu); each flags where a
block of 16 tokens decays by more than 80 nats, and runs again there with exact products. Where batch and heads leave
multiprocessors idle, sequences are cut into segments: what each does to the state is a transfer matrix and an offset
(vector_transfers.cu), multiplied by the kernel of the scalar delta rule (delta/delta_segments.cu). Gradients:
vector_backward.py.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

from ...ops.cuda.arguments import NO_ROWS, address
from ...runtime.arrays import Array
from ...runtime.cuda import launch
from ...runtime.cuda.elements import Constants
from ...runtime.cuda.tensor_map import BYTES as MAP
from .. import policy
from ..types import Decay, Erase, Inputs, Plan, ReadState, Saved
from . import arguments, delta_plan, vector, vector_backward
from . import vector_plan as cuts
from .arguments import NO_STATES, States
from .operands import as_state, build_at, empty_positions, public_ends, states_at, with_positions
from .shared_memory import DELTA_END, SQUARE, TILE, VECTOR_FACTORS
from .vector import EXACT, PLAIN

NO_FIELDS = dict.fromkeys(arguments.DELTA.offsets, 0) | {  # of a launch that multiplies transfer matrices
    **dict.fromkeys(("q", "k", "v", "dout", "dv", "dq", "dk"), bytes(MAP)), "out": NO_ROWS, "other": NO_ROWS,
    "g": arguments.gate_of(None, 1), "beta": arguments.gate_of(None, 1), "start": NO_STATES.values(),
    "end": NO_STATES.values(), **NO_STATES.fields_of_positions(),
}  # fmt: skip


def unsupported_reason(call: Any) -> str | None:
    """Why the kernels do not cover a call with a vector decay and an erase DELTA; None where they do."""
    x, plan = call.x, call.plan
    if x.erase is not Erase.DELTA or x.decay is not Decay.VECTOR:
        return "the kernels are of the delta rule with a decay of the key channels"
    if not plan.erases_key or plan.erase_reads is not ReadState.DECAYED:
        return "the delta rule's kernels with a vector decay read with the key itself, after the decay"
    if plan.query_reads is not ReadState.UPDATED:
        return "the delta rule's kernels read each token after its own write"
    return vector.unsupported_arrays(x, plan)


def how(call: Any) -> str:
    """The kernels of a call that is covered, in words."""
    return "chains of chunks by warpgroup products (wgmma), exact where a block of 16 tokens decays by over 80 nats"


class Residuals(NamedTuple):
    """What a forward may store of every chunk: the state before it, P, A, the new values; first states of segments."""

    states: Array
    grams: Array
    inverses: Array
    new_values: Array
    begins: Array | None


def forward(
    x: Inputs, plan: Plan, state: Array | None, keep: bool | None = None
) -> tuple[Array, Array, Saved]:
    """(out, final state, saved). keep: with Residuals; by default for a backward, unless too large."""
    xp, batch, arrays = plan.xp, vector.batch_of(x, plan), vector.arrays_of(plan.xp, x)
    chunks, sizes = batch.slots * batch.heads, {"states": DELTA_END, "grams": SQUARE, "new_values": TILE}
    if keep is None:
        keep = vector.keeps(plan, chunks * (SQUARE + sum(sizes.values())))
    _prepare(batch, keep, build_at(plan))
    out = xp.empty((*batch.lead, batch.T, batch.heads, batch.V), dtype=x.v.dtype)
    end = xp.empty((batch.N, batch.H, batch.K, batch.V), dtype=xp.float32)
    at = empty_positions(xp, plan, batch)
    start = states_at(as_state(xp, state, batch), batch, batch.group)
    last = with_positions(xp, states_at(end, batch, batch.group), at, plan, batch)
    inverses, factors = _inverses(xp, batch, arrays)
    begins = None if factors is None else _begins(xp, batch, arrays, inverses, factors, start)
    slots = batch.N * batch.heads * batch.segments
    flags = xp.empty(slots, dtype=xp.int32)
    arrays["out"] = out if out.ndim == 4 else out.reshape(prod(batch.lead), *out.shape[-3:])
    kept = {n: xp.empty((chunks, size), dtype=xp.int8) for n, size in sizes.items()} if keep else {}
    for exact in (False, True):
        vector.launch_one("chain", batch, slots, arrays, cuts.Build(exact, keep, last.build_at), start=start,
                          begins=begins, flags=flags, end=last, inverses=inverses, scale=plan.scale, **kept)
    residuals = Residuals(inverses=inverses, begins=begins, **kept) if keep else None
    return out, public_ends(end, at, batch), Saved(x, plan, state, residuals)


def backward(saved: Saved, dout: Array | None, dstate: Any) -> tuple[Inputs, Array]:
    """Gradients of every input and of the initial state; the keys' own as they read is in theirs as they write."""
    if not policy.VECTOR_BACKWARD:
        return vector.by_array_calls(saved, dout, dstate)
    if saved.starts is None:
        saved = forward(saved.x, saved.plan, saved.state, keep=True)[2]
    return vector_backward.backward(saved, dout, dstate)


def _prepare(batch: vector.Batch, keep: bool, at: int) -> None:
    cut = batch.segments > 1
    wanted = [("inverse", cuts.Build(keep=cut)), ("inverse", EXACT)]
    wanted += [("chain", cuts.Build(exact, keep, at)) for exact in (False, True)]
    wanted += [("transfers", PLAIN)] if cut else []
    vector.begin_compiling(batch, wanted, ((delta_plan.SEGMENTS, _segments(batch)),) if cut else ())


def _segments(batch: vector.Batch) -> Constants:
    return delta_plan.constants("segments", batch.K, batch.V, True)


def _inverses(xp: Any, batch: vector.Batch, arrays: dict[str, Any]) -> tuple[Array, Array | None]:
    """A of every chunk; where sequences are cut also what transfers take of it."""
    chunks, cut = batch.slots * batch.heads, batch.segments > 1
    inverses = xp.empty((chunks, SQUARE), dtype=xp.int8)
    factors = xp.empty((chunks, VECTOR_FACTORS), dtype=xp.int8) if cut else None
    flags, slots = xp.empty(chunks, dtype=xp.int32), batch.N * batch.heads
    vector.launch_one("inverse", batch, slots * batch.segments * batch.chunks, arrays, cuts.Build(keep=cut),
                      inverses=inverses, flags=flags, factors=factors)
    vector.launch_one("inverse", batch, slots * policy.EXACT_PIECES, arrays, EXACT, inverses=inverses, flags=flags)
    return inverses, factors


def _begins(
    xp: Any, batch: vector.Batch, arrays: dict[str, Any], inverses: Array, factors: Array, start: States
) -> Array:
    """The state that each segment begins with: offsets and transfer matrices, multiplied by the delta rule's kernel."""
    slots, inner = batch.N * batch.heads, batch.segments - 1
    added, transfers = (xp.empty((slots * inner, cuts.STATE), dtype=xp.float32) for _ in range(2))
    begins = xp.empty((slots * batch.segments, cuts.STATE), dtype=xp.float32)
    vector.launch_one("transfers", batch, slots * inner * 4, arrays, start=start, inverses=inverses, factors=factors,
                      added=added, transfers=transfers)
    constants = _segments(batch)
    packed = arguments.DELTA.packed(NO_FIELDS | {
        "offsets": address(batch.offsets), "begins": address(begins), "added": address(added),
        "transfers": address(transfers), "T": batch.T, "heads": batch.heads, "segments": batch.segments,
        "chunks": batch.chunks,
    })  # fmt: skip
    kernel = delta_plan.KERNELS["segments"]
    launch.launch(kernel.file, kernel.entry, constants, slots * 8, kernel.threads, dict(constants)["LA_SHARED"], packed,
                  (batch.offsets, begins, added, transfers))
    return begins
