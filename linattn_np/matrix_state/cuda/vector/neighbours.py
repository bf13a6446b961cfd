"""The states that segments begin with where other ranks have the tokens before and after them: decays of key channels.

    S_begin(next)^T = S_begin^T diag(decay) + added         S_begin(first): of the ranks before; backward of those after

One segment more than there are: what it begins with is the state after all others, in the direction of the scan.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ....runtime.arrays import Array
from ...types import Plan
from ..arguments import NO_STATES, States
from ..operands import as_state, one_head_each, public_state, public_state_gradient, states_at
from . import plan as cuts
from .launch import VectorBatch, launch_one, sum_segments

Arrays = dict[str, Any]
FORGOTTEN = 1e-38  # the decay of a channel that a segment has forgotten


def entered(xp: Any, plan: Plan, batch: VectorBatch, arrays: Arrays) -> tuple[Array, Array | None]:
    """(the states that segments begin with, the one before all, (N, H, K, V), None for zeros)."""
    added, decays = empty(xp, batch)
    inner = batch.N * batch.heads * (batch.segments - 1)
    launch_one("adds", batch, inner, arrays, every=True, added=added, decays=decays)
    begins = _along(xp, batch, arrays, added, decays, NO_STATES)
    each = decays.reshape(batch.N, batch.heads, -1, cuts.WIDEST)[:, :: batch.group, :, : batch.K]
    transfer = xp.sum(xp.log(xp.clip(each, FORGOTTEN, None)), axis=-2)
    offset = xp.ascontiguousarray(_public(xp, batch, begins, -1)[:, :: batch.group, ...])
    whole = public_state(transfer, batch), public_state(offset, batch)
    S = as_state(xp, plan.neighbours.state(*whole), batch)  # type: ignore[union-attr]
    if S is not None:
        begins = _along(xp, batch, arrays, added, decays, states_at(S, batch, batch.group))
    return begins, S


def left(
    xp: Any, plan: Plan, batch: VectorBatch, arrays: Arrays, added: Array, decays: Array
) -> tuple[Array, Array | None]:
    """(the gradients of the states that segments end with, that of the last one (N, heads, K, V), None for zeros)."""
    ends = _along(xp, batch, arrays, added, decays, NO_STATES, reverse=True)
    d = public_state_gradient(xp, xp.ascontiguousarray(_public(xp, batch, ends, 0)), batch)
    dend = one_head_each(xp, as_state(xp, plan.neighbours.gradient(d), batch), batch)  # type: ignore[union-attr]
    if dend is not None:
        ends = _along(xp, batch, arrays, added, decays, states_at(dend, batch), reverse=True)
    return ends.reshape(-1)[cuts.STATE :], dend  # before segment s + 1 is after segment s


def empty(xp: Any, batch: VectorBatch) -> tuple[Array, Array]:
    """Arrays for the offsets and the decays of segments."""
    inner = batch.N * batch.heads * (batch.segments - 1)
    added, decays = (xp.empty((inner, n), dtype=xp.float32) for n in (cuts.STATE, cuts.WIDEST))
    return added, decays


def _along(
    xp: Any, batch: VectorBatch, arrays: Arrays, added: Array, decays: Array, start: States, reverse: bool = False
) -> Array:
    """The states between all segments (slots, segments, WIDE WIDE), from `start`."""
    begins = xp.empty((batch.N * batch.heads, batch.segments, cuts.STATE), dtype=xp.float32)
    alone = replace(batch, offsets=None, T=batch.segments * cuts.CHUNK, chunks=1)  # a chunk a segment
    own = {n: y for n, y in arrays.items() if n != "fields"}
    sum_segments(alone, own, reverse=reverse, start=start, added=added, decays=decays, begins=begins)
    return begins


def _public(xp: Any, batch: VectorBatch, states: Array, at: int) -> Array:
    """The states between two segments as (N, heads, K, V)."""
    rows = states.reshape(batch.N, batch.heads, batch.segments, cuts.WIDEST, cuts.WIDEST)
    return xp.matrix_transpose(rows[:, :, at, : batch.V, : batch.K])
