"""Sequences that are cut at the positions of plan.states_at: segments, each of which begins with the state of the last.

The bits are those of calls that end at the positions and hand their states on, in the form of the whole sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ..core import StatesAt
from ..runtime.arrays import Array
from ..runtime.shapes import Chunk, Segment, Sequence
from ..runtime.shapes import segments as segments_of
from .heads import initial_state, join_state
from .types import Inputs, Plan


class Table(NamedTuple):
    """The chunks of a segment, and the index of the position at its end, -1 if there is none."""

    chunks: list[Chunk]
    at: int


def segments(plan: Plan, sequence: Sequence) -> list[Segment]:
    """The segments of a sequence."""
    return segments_of(sequence, plan.states_at or ())


def forward(
    form: Any, core: Inputs, plan: Plan, tables: list[Table], S: Array, put: Callable[[int, Array], None] | None
) -> tuple[list[Array], list[Any]]:
    """(the state at the end of each segment, the residuals of each)."""
    ends, residuals = [], []
    for table in tables:
        S, kept = form.forward(core, plan, table.chunks, S, put)
        ends.append(S)
        residuals.append(kept)
    return ends, residuals


def backward(
    form: Any, core: Inputs, plan: Plan, saved: list[tuple[Table, Any]], dout: Array | None, dS: Array,
    dat: list[Array | None], put: Callable[[int, dict[str, Array]], None],
) -> Array:  # fmt: skip
    """dS_0; saved: the segments with their residuals; dat: the gradient of the state at each position, or None."""
    for table, residuals in reversed(saved):
        if table.at >= 0 and dat[table.at] is not None:
            dS = dS + dat[table.at]
        dS = form.backward(core, plan, table.chunks, residuals, dout, dS, put)
    return dS


def with_positions(plan: Plan, end: Array, at: list[Array]) -> Any:
    """The public final state: with plan.states_at a StatesAt of it and of the core-layout states at the positions."""
    if plan.states_at is None:
        return end
    xp, joined = plan.xp, [join_state(plan.xp, S) for S in at]
    if plan.is_ragged:
        return StatesAt(end, xp.stack([xp.reshape(S, S.shape[-3:]) for S in joined], axis=0))
    return StatesAt(end, xp.stack(joined, axis=-4))


def gradients_at(core: Inputs, plan: Plan, dstate: Any, G: int) -> tuple[Array | None, list[Array | None]]:
    """(gradient of the final state, that of each position in core layout); None for what is not given."""
    if not isinstance(dstate, StatesAt):
        return dstate, [None] * len(plan.states_at or ())
    end, at = dstate
    count = range(len(plan.states_at or ()))
    if at is None:
        return end, [None for _ in count]
    if plan.is_ragged:
        return end, [initial_state(core, plan, at, n, G) for n in count]
    return end, [initial_state(core, plan, at[..., n, :, :, :], None, G) for n in count]
