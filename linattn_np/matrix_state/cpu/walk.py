"""Backward: a task is one sequence and the heads of a group, whose gradients of shared inputs add up in their order.

A segment of chunks is walked forward, each chunk's incoming state and what it writes kept in a slot, and then back.
Where a sequence has more chunks than there are slots, it is walked once more before, for the states that its segments
begin with.
"""

from __future__ import annotations

import contextlib
import functools

from .backward import BackwardChunk
from .chunk import Cell
from .interpreter.program import EARLIER, FIRST, FROM, HEAD, LATER, LEAD, ONE, STATE, STOP, TO, Program
from .slots import begin_states
from .table import ENDS, IN_BONUS, IN_DSTATE, IN_STATE, OUT_DBONUS, OUT_DSTATE, STARTS


def _writes(x: BackwardChunk, S: int) -> None:
    """What one chunk writes, S being its incoming state."""
    x.begin()
    x.writers()
    x.decays()
    if x.N:
        x.erase(S, x.system())


class Walk:
    """The walks of one head over one sequence: the first segment is short, so that few chunks are walked once more."""

    def __init__(self, p: Program, cell: Cell, chunks: int):
        self.p, self.x = p, BackwardChunk(p, cell)
        self.S, self.z = p.matrix(cell.K, cell.V), 0 if self.x.averaging is None else self.x.averaging.z
        self.slots = self.x.slots(chunks)
        self.tokens = p.literal(self.slots * cell.C)
        segments = -(-chunks // self.slots)
        self.begun: list[tuple[int, int, int]] = [self._states(p.matrix(segments * cell.K, cell.V), cell.K)]
        if self.z:
            self.begun.append(self._states(p.matrix(segments, cell.K), 1))
        self.n, self.segment, self.first, self.end = (p.register() for _ in range(4))
        self.zero, self.one = p.literal(0), p.literal(1)

    def _states(self, states: int, rows: int) -> tuple[int, int, int]:
        """(view of one segment's, of all, bytes apart)."""
        return self.p.view(), states, self.p.matrices[states][1] * rows * self.p.dtype.itemsize

    def state_of_segment(self, S: int, z: int, to: bool) -> None:
        """S and z to the place of the segment's first, or from there."""
        p, x = self.p, self.x
        sizes = ((S, x.K, x.width), (z, self.one, x.K))
        for (view, states, apart), (y, m, n) in zip(self.begun, sizes, strict=False):
            p.place(view, states, self.segment, apart)
            p.copy(*((y, m, n, view) if to else (view, m, n, y)), ONE)

    def write(self, S: int, out: int, z: int, z_out: int) -> None:
        """The state after the chunk."""
        x = self.x
        x.write(S, out)
        if x.averaging is not None:
            x.averaging.add_keys(x.k, x.c, z, z_out)

    def find_states(self) -> None:
        """The states that segments begin with; `segment` is then the last."""
        p, x = self.p, self.x
        p.add(x.t, FIRST, self.zero)
        p.add(self.end, FIRST, LEAD)
        p.add(self.segment, self.zero, self.zero)
        x.kept.place(self.zero)
        top = p.here()
        self.state_of_segment(self.S, self.z, True)
        with p.only_if(self.end, STOP):
            again = p.here()
            _writes(x, self.S)
            self.write(self.S, self.S, self.z, self.z)
            p.add(x.t, x.t, x.c)
            p.less(x.t, self.end, again)
            p.add(self.segment, self.segment, self.one)
            p.add(self.end, self.end, self.tokens)
            p.less(self.zero, self.one, top)

    def segments(self) -> None:
        """Segments last to first, each walked forward into slots and then back."""
        p, x = self.p, self.x
        C, averaging = p.literal(x.cell.C), x.averaging
        here, after = (0, 0) if averaging is None else (averaging.here, averaging.next)
        top = p.here()
        p.times(self.end, self.segment, self.tokens)
        p.add(self.end, self.end, LEAD)
        p.add(self.end, self.end, FIRST)
        p.minus(self.first, self.end, self.tokens)
        with p.only_if(self.first, FIRST):
            p.add(self.first, FIRST, self.zero)
        p.least(self.end, self.end, STOP)
        p.add(self.n, self.zero, self.zero)
        p.add(x.t, self.first, self.zero)
        x.kept.place(self.n)
        self.state_of_segment(x.S, here, False)
        x.returns = False
        again = p.here()
        x.kept.place(self.n)
        _writes(x, x.S)
        p.add(self.n, self.n, self.one)
        p.add(x.t, x.t, x.c)
        with p.only_if(x.t, self.end):  # the state after the last chunk is known, or nobody asks for it
            self.write(x.S, x.next_S, here, after)
        p.less(x.t, self.end, again)
        x.returns = True
        back = p.here()
        p.minus(self.n, self.n, self.one)
        p.times(x.t, self.n, C)
        p.add(x.t, x.t, self.first)
        x.kept.place(self.n)
        x.begin()
        x.writers()
        x.decays_again()
        x.pull()
        p.less(self.zero, self.n, back)
        p.minus(self.segment, self.segment, self.one)
        p.less(p.literal(-1), self.segment, top)


@functools.lru_cache(256)
def backward_program(cell: Cell, group: int, chunks: int, dstate: bool, apart: bool = False) -> tuple[Program, int]:
    """Every gradient, of at most `chunks` chunks a task, and the chunks of a segment.

    A task begins with the first of `group` heads. apart: dS between strips is known, tasks do not hand it on.
    """
    p = Program(cell.dtype)
    walk = Walk(p, cell, max(1, chunks))
    x, zero, one, last = walk.x, walk.zero, walk.one, p.register()
    x.once()
    p.add(last, HEAD, p.literal(group))
    head = p.here()
    if cell.bonus:
        p.load(x.u, IN_BONUS, zero, HEAD, one, zero, x.K)
        p.clear(x.dU, zero, one, x.K)
    dz = 0 if x.averaging is None else x.averaging.dz
    begins = ((walk.S, walk.z, EARLIER, IN_STATE, cell.started, STARTS, FROM),
              (x.dS, dz, LATER, IN_DSTATE, dstate, *((ENDS, TO) if apart else (OUT_DSTATE, STATE))))  # fmt: skip
    for S, z, first, array, given, between, row in begins:
        parts = [(S, zero, x.width), (z, x.width, one)] if z else [(S, zero, x.width)]
        begin_states(p, parts, x.K, first, array if given else None, (between, row))
    with p.only_if(FIRST, STOP):
        walk.find_states()
        walk.segments()
    with p.only_if(EARLIER, one) if apart else contextlib.nullcontext():
        p.store_state(x.dS, OUT_DSTATE, STATE, HEAD, x.K, zero, x.width)
        if dz:
            p.store_state(dz, OUT_DSTATE, STATE, HEAD, x.K, x.width, one)
    if cell.bonus:
        p.put(x.dU, OUT_DBONUS, STATE, HEAD, one, x.K, ONE)
    p.add(HEAD, HEAD, one)
    p.less(HEAD, last, head)
    return p, walk.slots
