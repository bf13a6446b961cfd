"""Sequences that are cut at the positions of plan.states_at: segments; each begins with the state of the last.

The results have the bits of calls that end at the positions and hand their states on, in the form of the whole
sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ..core import StatesAt
from ..runtime.arrays import Array
from ..runtime.shapes import Chunk
from .heads import initial_state, join_state
from .types import Inputs, Plan


class SegmentTable(NamedTuple):
    """The chunks of a segment, and the index of the position at its end, -1 if there is none."""

    chunks: list[Chunk]
    at: int


class Segments(NamedTuple):
    """A sequence in a form that array calls have; the segments of a form that CUTS are one pass over all chunks."""

    form: Any  # forward, backward
    tables: list[SegmentTable]

    def forward(
        self, core: Inputs, plan: Plan, S: Array, put: Callable[[int, Array], None] | None
    ) -> tuple[list[Array], list[Any]]:
        """(the state at the end of each segment, residuals)."""
        if getattr(self.form, "CUTS", False):
            found: dict[int, Array] = {}
            S, saved = self.form.forward(core, plan, self._chunks, S, put, found.__setitem__, self._stops)
            return [found.get(stop, S) for stop in self._stops], [saved]
        ends, residuals = [], []
        for table in self.tables:
            S, saved = self.form.forward(core, plan, table.chunks, S, put)
            ends.append(S)
            residuals.append(saved)
        return ends, residuals

    def backward(
        self, core: Inputs, plan: Plan, residuals: list[Any], dout: Array | None, dS: Array, dat: list[Array | None],
        put: Callable[[int, dict[str, Array]], None],
    ) -> Array:  # fmt: skip
        """dS_0; dat: the gradient of the state at each position, or None."""
        more = [None if table.at < 0 else dat[table.at] for table in self.tables]
        if getattr(self.form, "CUTS", False):
            added = {stop: d for stop, d in zip(self._stops, more, strict=True) if d is not None}
            return self.form.backward(core, plan, self._chunks, residuals[0], dout, dS, put, added)
        for table, saved, d in zip(reversed(self.tables), reversed(residuals), reversed(more), strict=True):
            dS = self.form.backward(core, plan, table.chunks, saved, dout, dS if d is None else dS + d, put)
        return dS

    @property
    def _chunks(self) -> list[Chunk]:
        return [chunk for table in self.tables for chunk in table.chunks]

    @property
    def _stops(self) -> list[int]:
        """The last token of each segment, -1 of one without tokens."""
        return [table.chunks[-1].stop if table.chunks else -1 for table in self.tables]


def with_positions(plan: Plan, end: Array, at: list[Array]) -> Any:
    """The public final state: with plan.states_at a StatesAt of it and of the core-layout states at the positions."""
    if plan.states_at is None:
        return end
    xp, joined = plan.xp, [join_state(plan.xp, S) for S in at]
    if plan.is_ragged:
        return StatesAt(end, xp.stack([xp.reshape(S, S.shape[-3:]) for S in joined], axis=0))
    return StatesAt(end, xp.stack(joined, axis=-4))


def gradients_at(core: Inputs, plan: Plan, dstate: Any, G: int) -> tuple[Array | None, list[Array | None]]:
    """(gradient of the final state, gradient of each position's state in core layout); None where not given."""
    if not isinstance(dstate, StatesAt):
        return dstate, [None] * len(plan.states_at or ())
    end, at = dstate
    count = range(len(plan.states_at or ()))
    if at is None:
        return end, [None for _ in count]
    if plan.is_ragged:
        return end, [initial_state(core, plan, at, n, G) for n in count]
    return end, [initial_state(core, plan, at[..., n, :, :, :], None, G) for n in count]
