"""The states that segments begin with where other ranks have the tokens before and after them: transfer matrices.

    S_{s+1} = S_s M_s + added_s             S_0: of the ranks before, once they have the sum of all segments here
    dS_s = dS_{s+1} M_s^T + added_s         backward, dS of the last one: of the ranks after

States are value row by key column, WIDE by WIDE, in float32. The kernel that goes from segment to segment begins with
an offset (delta/delta_segments.cu): S_0 is that of one more segment before the first. Batches have two segments more
than sequences are cut into, transfers and offsets one: transfers of segment s are at s + 1.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...runtime.arrays import Array
from ..types import Plan
from .operands import ChunkSizes, as_state, one_head_each, public_state, public_state_gradient
from .shared_memory import DELTA_STATE, TRANSFER
from .vector.launch import multiply_transfers
from .vector.plan import CHUNK, WIDEST


def empty_offsets(xp: Any, batch: ChunkSizes) -> Array:
    """An array for the offsets of segments."""
    return xp.empty((batch.N * batch.heads, batch.segments - 1, DELTA_STATE), dtype=xp.float32)


def empty_transfers(xp: Any, batch: ChunkSizes) -> Array:
    """An array for the transfer matrices of segments."""
    return xp.empty((batch.N * batch.heads, batch.segments - 1, TRANSFER), dtype=xp.int8)


def second(y: Array) -> Array:
    """An array (slots, segments, n) as kernels have it that count from its second segment."""
    return y.reshape(-1)[y.shape[-1] :]


def entered(xp: Any, plan: Plan, batch: ChunkSizes, added: Array, transfers: Array) -> tuple[Array, Array | None]:
    """(the states that segments begin with, the one before all, None for zeros). added: of segment s at s + 1."""
    identity = xp.zeros_like(added)
    identity[:, 0, :: WIDEST + 1] = 1
    transfer = _public(xp, batch, _along(xp, batch, identity, transfers)[:, -1, :], batch.K)[:, :: batch.group, ...]
    begins = _along(xp, batch, _with(xp, batch, added, 0, None), transfers)
    offset = _public(xp, batch, begins[:, -1, :], batch.V)[:, :: batch.group, ...]
    whole = (public_state(xp.ascontiguousarray(y), batch) for y in (transfer, offset))
    S = as_state(xp, plan.neighbours.state(*whole), batch)  # type: ignore[union-attr]
    if S is not None:
        each = xp.repeat(S, batch.group, axis=1) if batch.group > 1 else S
        begins = _along(xp, batch, _with(xp, batch, added, 0, each), transfers)
    return second(begins), S


def left(xp: Any, plan: Plan, batch: ChunkSizes, added: Array, transfers: Array) -> tuple[Array, Array | None]:
    """(the gradients of the states that segments end with, that of the last one (N, heads, K, V), None for zeros).

    added: of segment s at s.
    """
    ends = _along(xp, batch, _with(xp, batch, added, -1, None), transfers, reverse=True)
    d = public_state_gradient(xp, xp.ascontiguousarray(_public(xp, batch, ends[:, 0, :], batch.V)), batch)
    dend = one_head_each(xp, as_state(xp, plan.neighbours.gradient(d), batch), batch)  # type: ignore[union-attr]
    if dend is not None:
        ends = _along(xp, batch, _with(xp, batch, added, -1, dend), transfers, reverse=True)
    return second(ends), dend


def _along(xp: Any, batch: ChunkSizes, added: Array, transfers: Array, reverse: bool = False) -> Array:
    """The states between all segments (slots, segments, WIDE WIDE); `added` of the first one is what it begins with."""
    begins = xp.empty((batch.N * batch.heads, batch.segments, DELTA_STATE), dtype=xp.float32)
    alone = replace(batch, offsets=None, T=batch.segments * CHUNK, chunks=1)  # a chunk a segment
    multiply_transfers(alone, reverse, added=added, transfers=transfers, begins=begins)
    return begins


def _with(xp: Any, batch: ChunkSizes, added: Array, at: int, S: Array | None) -> Array:
    """`added`, with a state (N, heads, K, V) or zeros at one end."""
    rows = _matrices(added)[:, at, :, :]
    rows[...] = 0
    if S is not None:
        rows[:, : batch.V, : batch.K] = xp.matrix_transpose(S.reshape(-1, batch.K, batch.V))
    return added


def _matrices(states: Array) -> Array:
    return states.reshape(*states.shape[:-1], WIDEST, WIDEST)


def _public(xp: Any, batch: ChunkSizes, states: Array, columns: int) -> Array:
    """(slots, WIDE WIDE) as (N, heads, K, columns)."""
    rows = _matrices(states)[:, :columns, : batch.K]
    return xp.matrix_transpose(rows).reshape(batch.N, batch.heads, batch.K, columns)
