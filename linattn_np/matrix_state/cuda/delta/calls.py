"""The delta rule as CUDA kernels on CuPy arrays: erase DELTA, decay NONE or SCALAR.

Kernels with warpgroup products, for compute capability 90, bfloat16, K and V up to 128; portable/delta.py has the
kernels for all other calls. Forward: the intra-chunk WY factors of all chunks in parallel (delta_block.cu), then the
scan over chunks (delta_chain.cu). Backward: a reverse scan for dv and the state gradients (delta_reverse.cu), then a
forward scan for the other gradients (delta_grads.cu). Where batch and heads leave multiprocessors idle, sequences are
cut into segments. A segment maps the state by a transfer matrix and an offset (delta_adds.cu); from these a small
kernel computes the initial state of each segment, and in backward its final gradient (delta_segments.cu). Between other
ranks ../neighbours.py does.
docs/internals/chain.md has the equations.
"""

from __future__ import annotations

from typing import Any

from ....ops.sums import sum_to
from ....runtime.arrays import Array
from ....runtime.cuda import launch
from ... import policy
from ...types import Inputs, Plan, ReadState, Saved
from .. import neighbours, operands
from ..arguments import States
from ..portable import delta as portable_delta
from ..shared_memory import DELTA_ENDS, DELTA_STATE, TRANSFER, delta_checkpoint
from . import plan as cuts
from .launch import ADD, EVERY, WHOLE, DeltaBatch, add_gradients, arrays_of, batch_of, launch_one


def unsupported_reason(x: Inputs, plan: Plan) -> str | None:
    """Why the kernels do not cover a call with erase DELTA; None where they do."""
    if why := portable_delta.unsupported_reason(x, plan):
        return why
    if not plan.erases_key or plan.erase_reads is not ReadState.DECAYED:
        return "the chains by warpgroup products read with the key itself, after the decay"
    element, K, V = operands.common_element(x.q, x.k, x.v, x.r), x.k.shape[-1], x.v.shape[-1]
    if not cuts.takes(element, K, V, launch.capability()):
        return "the chains by warpgroup products take bfloat16 on compute capability 90, K and V up to 128"
    return None


unsupported_gradients = unsupported_reason


def how(x: Inputs, plan: Plan) -> str:
    """The kernels of a call that is covered, in words."""
    return "chains of chunks by warpgroup products (wgmma)"


def handles(x: Inputs, plan: Plan) -> frozenset[str]:
    """The preprocessing steps that the kernels include."""
    skips = cuts.skips(plan.micro_steps, x.k.shape[-1], x.v.shape[-1])
    more = operands.states_handled(plan) | operands.neighbours_handled(plan)
    return frozenset({"l2norm"} | ({"micro_steps"} if skips else set()) | more)


def forward(x: Inputs, plan: Plan, state: Array | None) -> tuple[Array, Array, Saved]:
    """(out, final state, saved): factors of every chunk; initial state and transfer matrix of every segment."""
    xp, batch = plan.xp, batch_of(x, plan)
    launch.prepare(tuple(
        (cuts.KERNELS[name].file, cuts.constants(name, batch.K, batch.V, batch.decay, reverse, batch.unit, batch.steps,
                                                 operands.build_at(plan)))
        for name, reverse in cuts.names(batch.segments, plan.gradients)
    ), launch.capability())  # fmt: skip
    arrays = arrays_of(xp, x)
    out = xp.empty((*batch.lead, batch.T // batch.steps, batch.heads, batch.V), dtype=x.v.dtype)
    end = xp.empty((batch.N, batch.H, batch.K, batch.V), dtype=xp.float32)
    start = operands.states_at(operands.as_state(xp, state, batch), batch, batch.group)
    checkpoints = _checkpoints(xp, batch, arrays)
    if plan.neighbours is None:
        begins, transfers = _begins(xp, batch, arrays, checkpoints, start)
    else:
        begins, transfers, state = _entered(xp, plan, batch, arrays, checkpoints)
        start = operands.states_at(state, batch, batch.group)
    at = operands.empty_positions(xp, plan, batch)
    last = operands.with_positions(xp, operands.states_at(end, batch, batch.group), at, plan, batch)
    launch_one(
        "chain",
        batch,
        batch.N * batch.heads * batch.segments,
        arrays,
        out=out,
        checkpoints=checkpoints,
        begins=begins,
        start=start,
        end=last,
        scale=plan.scale,
    )
    transfers = transfers if plan.gradients else None
    checkpoints = checkpoints if plan.gradients and policy.saves_factors(checkpoints.nbytes) else None
    return (
        out,
        operands.public_ends(end, at, batch),
        Saved(x, plan, state, {"checkpoints": checkpoints, "begins": begins, "transfers": transfers}),
    )


def backward(saved: Saved, dout: Array | None, dstate: Any) -> tuple[Inputs, Array]:
    """Gradients of every input and of the initial state; d.k includes the gradient of k as erase vector."""
    x, plan, state, residuals = saved
    residuals = residuals or dict.fromkeys(("checkpoints", "begins", "transfers"))
    xp, batch = plan.xp, batch_of(x, plan)
    arrays, heads = arrays_of(xp, x), batch.heads
    tokens = (*batch.lead, batch.T // batch.steps, heads)
    add_gradients(xp, batch, arrays, dout, x.v.dtype)
    dg = xp.empty(tokens, dtype=xp.float32) if batch.decay else None
    dbeta = xp.empty((*batch.lead, batch.T, heads), dtype=xp.float32)
    first = xp.empty((batch.N, heads, batch.K, batch.V), dtype=xp.float32)
    checkpoints = residuals["checkpoints"]
    if checkpoints is None:
        checkpoints = _checkpoints(xp, batch, arrays)
    ends = xp.empty((batch.slots * heads, DELTA_ENDS), dtype=xp.int8)
    dend, dat = operands.split_gradients(xp, dstate, batch)
    begins = None
    if plan.neighbours is not None:
        begins, dend = _left(xp, plan, batch, arrays, checkpoints, residuals["transfers"])
    else:
        dend = operands.one_head_each(xp, operands.as_state(xp, dend, batch), batch)
    last = operands.with_positions(xp, operands.states_at(dend, batch), dat, plan, batch)
    chain = {
        "checkpoints": checkpoints,
        "ends": ends,
        "out": arrays["dv"],
        "other": arrays["v"],
        "start": last,
        "end": operands.states_at(first, batch),
        "scale": plan.scale,
    }
    if begins is not None:
        launch_one("reverse", batch, batch.N * heads * batch.segments, arrays, **chain, begins=begins)
    elif batch.segments == 1:
        launch_one("reverse", batch, batch.N * heads, arrays, **chain, which=WHOLE)
    else:
        _reverse_segments(xp, batch, arrays, chain, residuals["transfers"])
    start = operands.states_at(operands.as_state(xp, state, batch), batch, batch.group)
    launch_one(
        "grads",
        batch,
        batch.N * heads * batch.segments,
        arrays,
        checkpoints=checkpoints,
        ends=ends,
        out=arrays["dq"],
        other=arrays["dk"],
        begins=residuals["begins"],
        start=start,
        dg=dg,
        dbeta=dbeta,
        scale=plan.scale,
    )
    grads = {n: operands.head_sums(xp, arrays["d" + n], getattr(x, n).shape) for n in ("q", "k", "v")}
    for name, d in (("g", dg), ("beta", dbeta)):
        if d is not None:
            y = getattr(x, name)
            grads[name] = sum_to(xp, operands.sum_shared_heads(xp, d[..., None], (*batch.lead, *y.shape[-3:])), y.shape)
    return Inputs(**{n: grads.get(n) for n in Inputs._fields}), operands.public_state_gradient(xp, first, batch)


def _checkpoints(xp: Any, batch: DeltaBatch, arrays: dict[str, Array | None]) -> Array:
    """The state-independent factors of every chunk."""
    checkpoints = xp.empty((batch.slots * batch.heads, delta_checkpoint(batch.unit)), dtype=xp.int8)
    launch_one(
        "block",
        batch,
        batch.N * batch.heads * batch.chunks_longest,
        arrays,
        checkpoints=checkpoints,
        chunks=batch.chunks_longest,
    )
    return checkpoints


def _begins(
    xp: Any, batch: DeltaBatch, arrays: dict[str, Array | None], checkpoints: Array, start: States
) -> tuple[Array | None, Array | None]:
    """(initial state of each segment, transfer matrices of segments)."""
    if batch.segments == 1:
        return None, None
    slots, inner = batch.N * batch.heads, batch.segments - 1
    added = xp.empty((slots * inner, DELTA_STATE), dtype=xp.float32)
    transfers = xp.empty((slots * inner, TRANSFER), dtype=xp.int8)
    begins = xp.empty((slots * batch.segments, DELTA_STATE), dtype=xp.float32)
    launch_one(
        "adds", batch, slots * inner * 4, arrays, checkpoints=checkpoints, start=start, added=added, transfers=transfers
    )
    launch_one("segments", batch, slots * 8, arrays, added=added, transfers=transfers, begins=begins)
    return begins, transfers


def _entered(
    xp: Any, plan: Plan, batch: DeltaBatch, arrays: dict[str, Array | None], checkpoints: Array
) -> tuple[Array, Array, Array | None]:
    """(initial state of each segment, transfer matrices of segments, the initial state) between other ranks."""
    added, transfers = neighbours.empty_offsets(xp, batch), neighbours.empty_transfers(xp, batch)
    grid = batch.N * batch.heads * (batch.segments - 1) * 4
    to = {"added": neighbours.second(added), "transfers": neighbours.second(transfers)}
    launch_one("adds", batch, grid, arrays, checkpoints=checkpoints, every=True, **to)
    begins, state = neighbours.entered(xp, plan, batch, added, transfers)
    return begins, transfers, state


def _left(
    xp: Any, plan: Plan, batch: DeltaBatch, arrays: dict[str, Array | None], checkpoints: Array, transfers: Array
) -> tuple[Array, Array | None]:
    """(gradient after each segment, of the final state) between other ranks."""
    added, grid = neighbours.empty_offsets(xp, batch), batch.N * batch.heads * (batch.segments - 1)
    rows: dict[str, Any] = {"out": arrays["dv"], "other": arrays["v"]}
    launch_one(
        "reverse", batch, grid, arrays, checkpoints=checkpoints, added=added, scale=plan.scale, which=EVERY, **rows
    )
    return neighbours.left(xp, plan, batch, added, transfers)


def _reverse_segments(
    xp: Any, batch: DeltaBatch, arrays: dict[str, Array | None], chain: dict[str, Any], transfers: Array | None
) -> None:
    """The reverse scan of sequences in segments."""
    slots, inner = batch.N * batch.heads, batch.segments - 1
    added = xp.empty((slots * inner, DELTA_STATE), dtype=xp.float32)
    begins = xp.empty((slots * batch.segments, DELTA_STATE), dtype=xp.float32)
    launch_one("reverse", batch, slots * inner, arrays, **chain, added=added, which=ADD)
    launch_one("segments", batch, slots * 8, arrays, reverse=True, added=added, transfers=transfers, begins=begins)
    launch_one("reverse", batch, slots * batch.segments, arrays, **chain, begins=begins)
