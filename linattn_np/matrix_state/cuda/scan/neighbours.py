"""The states that segments begin with where other ranks have the tokens before and after them: scalar decays, or none.

    S_begin(next) = e^sum S_begin + added        S_begin(first): of the ranks before; backward of those after

One segment more than there are: what it begins with is the state after all others, in the direction of the scan.
"""

from __future__ import annotations

from dataclasses import replace
from math import log
from typing import Any

from ....runtime.arrays import Array
from ...types import Plan
from ..arguments import NO_STATES, States
from ..operands import as_state, one_head_each, public_state, public_state_gradient, states_at
from .launch import ScanBatch, empty_states, scan, sum_segments
from .plan import chunk_of


def entered(xp: Any, plan: Plan, batch: ScanBatch, k: Array, v: Array, g: Array | None) -> tuple[States, Array | None]:
    """(the states that segments begin with, the one before all, (N, H, K, V), None for zeros)."""
    states, own = _offsets(xp, batch, (k, v), g, 1.0, reverse=False)
    sums = xp.reshape(own.sums, (batch.N, batch.H, batch.group, -1))[:, :, 0, : batch.segments - 1]
    transfer = None if g is None else public_state(xp.sum(sums, axis=-1) * log(2), batch)
    offset = xp.ascontiguousarray(xp.matrix_transpose(_each(batch, own.array)[:, :: batch.group, -1, :, :]))
    S = as_state(xp, plan.neighbours.state(transfer, public_state(offset, batch)), batch)  # type: ignore[union-attr]
    if S is None:
        return own._replace(group=0), None
    sum_segments(_segments_alone(batch), states, states_at(S, batch, batch.group), reverse=False)
    return states._replace(group=0), S


def left(xp: Any, plan: Plan, batch: ScanBatch, q: Array, dout: Array, g: Array | None) -> States:
    """The gradients of the states that segments end with."""
    states, own = _offsets(xp, batch, (q, dout), g, plan.scale, reverse=True)
    d = xp.ascontiguousarray(xp.matrix_transpose(_each(batch, own.array)[:, :, 0, :, :]))
    dend = plan.neighbours.gradient(public_state_gradient(xp, d, batch))  # type: ignore[union-attr]
    dend = one_head_each(xp, as_state(xp, dend, batch), batch)
    if dend is None:
        return _shifted(own)._replace(group=0)
    sum_segments(_segments_alone(batch), states, states_at(dend, batch), reverse=True)
    return _shifted(states)._replace(group=0)


def _offsets(
    xp: Any, batch: ScanBatch, arrays: tuple[Array, Array], g: Array | None, write: float, reverse: bool
) -> tuple[States, States]:
    """(the offsets of all segments, what they begin with from zeros). Backward, that of segment s is at s + 1."""
    states = empty_states(xp, batch)
    to = _shifted(states) if reverse else states
    scan(batch, (None, *arrays, None), g, NO_STATES, to, (1.0, write), reverse, every=True)
    own = states._replace(array=xp.asarray(states.array, copy=True))
    sum_segments(_segments_alone(batch), own, NO_STATES, reverse)
    return states, own


def _shifted(states: States) -> States:
    """From the second state on."""
    return states._replace(array=states.array[1:], sums=states.sums[1:])  # type: ignore[index]


def _segments_alone(batch: ScanBatch) -> ScanBatch:
    """Sequences of a chunk a segment."""
    return replace(batch, T=batch.segments * chunk_of(batch.wgmma), chunks=1)


def _each(batch: ScanBatch, states: Array | None) -> Array:
    """States (N, heads, segments, V, K)."""
    return states.reshape(batch.N, batch.heads, batch.segments, batch.V, batch.K)  # type: ignore[union-attr]
