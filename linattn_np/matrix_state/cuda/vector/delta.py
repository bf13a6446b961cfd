"""The delta rule with one decay a token and key channel, as CUDA kernels on CuPy arrays: erase DELTA, decay VECTOR.

As vector/calls.py: compute capability 90, bfloat16, K and V up to 128. What a chunk can know before it sees a
state, all chunks at once (vector/vector_inverse.cu), then the chain of the chunks (vector_chain.cu); in both a chunk
with a block of 16 tokens that decays by more than 80 nats is recomputed with exact products. Where batch and heads
leave multiprocessors idle, sequences are cut into segments: what each does to the state is a transfer matrix and an
offset (vector_transfers.cu), multiplied by the kernel of the scalar delta rule (delta/delta_segments.cu), between other
ranks by ../neighbours.py. Gradients: gradients.py.
"""

from __future__ import annotations

from math import prod
from typing import Any

from ....runtime.arrays import Array
from ...types import Decay, Erase, Inputs, Plan, ReadState, Saved
from .. import neighbours
from ..arguments import States
from ..delta import plan as delta_plan
from ..operands import as_state, build_at, empty_positions, public_ends, states_at, with_positions
from ..shared_memory import DELTA_END, SQUARE, TILE, TRANSFER, VECTOR_FACTORS, VECTOR_INVERSE
from . import calls as vector
from . import gradients as vector_backward
from . import launch as launches
from . import plan as cuts
from .launch import PLAIN


def unsupported_reason(x: Inputs, plan: Plan, widths: tuple[int, int] | None = None) -> str | None:
    """Why no kernel covers a call with a vector decay and an erase DELTA, K and V as given; None where one does."""
    if x.erase is not Erase.DELTA or x.decay is not Decay.VECTOR:
        return "the kernels are of the delta rule with a decay of the key channels"
    if not plan.erases_key or plan.erase_reads is not ReadState.DECAYED:
        return "the delta rule's kernels with a vector decay read with the key itself, after the decay"
    if plan.query_reads is not ReadState.UPDATED:
        return "the delta rule's kernels read each token after its own write"
    return vector.unsupported_arrays(x, plan, widths)


unsupported_gradients = unsupported_reason


def how(x: Inputs, plan: Plan) -> str:
    """The kernels of a call that is covered, in words."""
    return "chains of chunks by warpgroup products (wgmma), exact where a block of 16 tokens decays by over 80 nats"


def handles(x: Inputs, plan: Plan) -> frozenset[str]:
    """The preprocessing steps that the kernels include."""
    return vector.handles(x, plan)


def forward(x: Inputs, plan: Plan, state: Array | None, keep: bool | None = None) -> tuple[Array, Array, Saved]:
    """(out, final state, saved).

    keep: with residuals, by default for a backward, unless too large: of every chunk the state before it, P, N and
    beta, the new values; of segments the states that they begin with, their transfer matrices.
    """
    xp, batch, arrays = plan.xp, launches.batch_of(x, plan), launches.arrays_of(plan.xp, x)
    chunks, sizes = batch.slots * batch.heads, {"states": DELTA_END, "grams": SQUARE, "new_values": TILE}
    if keep is None:
        keep = vector.keeps(plan, chunks * (SQUARE + sum(sizes.values())))  # strengths are not counted
    _prepare(batch, keep, build_at(plan))
    if plan.gradients:
        vector_backward.prepare(batch, erase=True)
    out = xp.empty((*batch.lead, batch.T, batch.heads, batch.V), dtype=x.v.dtype)
    end = xp.empty((batch.N, batch.H, batch.K, batch.V), dtype=xp.float32)
    at = empty_positions(xp, plan, batch)
    start = states_at(as_state(xp, state, batch), batch, batch.group)
    last = with_positions(xp, states_at(end, batch, batch.group), at, plan, batch)
    between = plan.neighbours is not None
    inverses, factors = _inverses(xp, batch, arrays, between)
    begins, transfers = None, None
    if between:
        begins, transfers, state = _entered(xp, plan, batch, arrays, inverses, factors)
        start = states_at(state, batch, batch.group)
    elif factors is not None:
        begins, transfers = _begins(xp, batch, arrays, inverses, factors, start)
    arrays["out"] = out if out.ndim == 4 else out.reshape(prod(batch.lead), *out.shape[-3:])
    stored = {n: xp.empty((chunks, size), dtype=xp.int8) for n, size in sizes.items()} if keep else {}
    build = cuts.Build(keep=keep, at=last.build_at)
    launches.launch_one(
        "chain",
        batch,
        batch.N * batch.heads * batch.segments,
        arrays,
        build,
        start=start,
        begins=begins,
        end=last,
        inverses=inverses,
        scale=plan.scale,
        **stored,
    )
    residuals = stored | {"inverses": inverses, "begins": begins, "transfers": transfers} if keep else None
    return out, public_ends(end, at, batch), Saved(x, plan, state, residuals)


def backward(saved: Saved, dout: Array | None, dstate: Any) -> tuple[Inputs, Array]:
    """Gradients of every input and of the initial state; the keys' own as they read is in theirs as they write."""
    if saved.starts is None:
        saved = forward(saved.x, saved.plan, saved.state, keep=True)[2]
    return vector_backward.backward(saved, dout, dstate)


def _prepare(batch: launches.VectorBatch, keep: bool, at: int) -> None:
    cut = batch.segments > 1
    wanted = [("inverse", cuts.Build(keep=cut)), ("chain", cuts.Build(keep=keep, at=at))]
    wanted += [("transfers", PLAIN)] if cut else []
    launches.begin_compiling(batch, wanted, ((delta_plan.SEGMENTS, launches.transfer_constants(batch)),) if cut else ())


def _inverses(xp: Any, batch: launches.VectorBatch, arrays: dict[str, Any], every: bool) -> tuple[Array, Array | None]:
    """A of every chunk; where sequences are cut also what transfers take of it. every: of the last segment too."""
    chunks, cut = batch.slots * batch.heads, batch.segments > 1
    inverses = xp.empty((chunks, VECTOR_INVERSE), dtype=xp.int8)
    factors = xp.empty((chunks, VECTOR_FACTORS), dtype=xp.int8) if cut else None
    blocks = batch.N * batch.heads * batch.segments * batch.chunks
    build, outputs = cuts.Build(keep=cut), {"inverses": inverses, "factors": factors}
    launches.launch_one("inverse", batch, blocks, arrays, build, every=every, **outputs)
    return inverses, factors


def _begins(
    xp: Any, batch: launches.VectorBatch, arrays: dict[str, Any], inverses: Array, factors: Array, start: States
) -> tuple[Array, Array]:
    """(the state that each segment begins with, transfer matrices of segments)."""
    slots, inner = batch.N * batch.heads, batch.segments - 1
    added = xp.empty((slots * inner, cuts.STATE), dtype=xp.float32)
    transfers = xp.empty((slots * inner, TRANSFER), dtype=xp.int8)
    begins = xp.empty((slots * batch.segments, cuts.STATE), dtype=xp.float32)
    launches.launch_one(
        "transfers",
        batch,
        slots * inner,
        arrays,
        start=start,
        inverses=inverses,
        factors=factors,
        added=added,
        transfers=transfers,
    )
    launches.multiply_transfers(batch, begins=begins, added=added, transfers=transfers)
    return begins, transfers


def _entered(
    xp: Any, plan: Plan, batch: launches.VectorBatch, arrays: dict[str, Any], inverses: Array, factors: Array | None
) -> tuple[Array, Array, Array | None]:
    """(the state that each segment begins with, transfer matrices, the one before all) between other ranks."""
    added, transfers = neighbours.empty_offsets(xp, batch), neighbours.empty_transfers(xp, batch)
    given = {"inverses": inverses, "factors": factors}
    to = {"added": neighbours.second(added), "transfers": neighbours.second(transfers)}
    grid = batch.N * batch.heads * (batch.segments - 1)
    launches.launch_one("transfers", batch, grid, arrays, every=True, **given, **to)
    begins, state = neighbours.entered(xp, plan, batch, added, transfers)
    return begins, transfers, state
