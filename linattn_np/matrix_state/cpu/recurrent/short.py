"""Short sequences in compiled loops: which take the recurrent form, and how it is shared out.

A form is chosen by the length of its own sequence: the same sequence gives the same bits alone and among others.
"""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np

from ....ops.cpu.programs import Program
from ....runtime import threads
from ....runtime.pieces.memory import address, handles, place
from ....runtime.pieces.piece import JIT, entry, load_pieces
from ....runtime.pieces.run import conversions, put, scratch
from ....runtime.pieces.workspace import PythonWorkspace
from ... import policy
from ...types import Decay, Erase, Inputs, Plan
from ..chunks import cell_of, key_width, numbers_of, state_shape
from ..layout import words_of
from ..table import EARLIER, STATE, TO, Table, count_sequences, is_direct, lengths
from . import step
from .step_workspace import FIRST, STEPS, TABLE_BYTES, layout


def is_stepwise(x: Inputs, plan: Plan, rows: np.ndarray) -> np.ndarray:
    """Whether each sequence takes the recurrent form: by the chunk size, its length, or for want of another form."""
    if plan.chunk_size == 1 or is_only_stepwise(x):
        return np.ones(len(rows), bool)
    plain = x.erase is Erase.NONE and x.decay is not Decay.VECTOR
    short = policy.SHORT_CPU_PLAIN if plain else policy.SHORT_CPU
    return (lengths(rows) <= short) & (plan.chunk_size is None)


def is_only_stepwise(x: Inputs) -> bool:
    """Whether no compiled chunk form covers the cell forward."""
    return x.gv is not None or goes_back_elsewhere(x)


def goes_back_elsewhere(x: Inputs) -> bool:
    """Whether no compiled chunk form covers the cell backward."""
    return x.u is not None and (x.erase is not Erase.NONE or x.gv is not None)


def in_place(x: Inputs, plan: Plan, state: np.ndarray) -> bool:
    """Whether the final state is written where the initial one lies: nothing else that is read may lie there."""
    if not plan.overwrite or state.dtype != plan.dtype:
        return False
    if state.strides[-1] != state.itemsize or not _is_spread_out(state) or not is_one_batch(state):
        return False
    return not any(y is not None and np.may_share_memory(state, y) for y in x)


def is_one_batch(y: np.ndarray) -> bool:
    """Whether (..., H, K, V) is an array (B, H, K, V) where it lies."""
    return not y.size or address(y.reshape((-1, *y.shape[-3:]))) == address(y)


def _is_spread_out(y: np.ndarray) -> bool:
    """Whether no two elements share memory: each axis steps over all that lies inside it."""
    extent = y.itemsize
    for stride, size in sorted((abs(stride), size) for stride, size in zip(y.strides, y.shape, strict=True)):
        if size > 1 and stride < extent:
            return False
        extent += stride * (size - 1)
    return True


class Steps:
    """A call of the recurrent form: all but where its arrays lie."""

    def __init__(self, x: Inputs, plan: Plan, state: np.ndarray | None, rows: np.ndarray, longest: int = 0):
        """longest: tokens of a row that may take the place of `rows`."""
        dtype, H, K, V = np.dtype(plan.dtype), x.v.shape[-2], key_width(x, plan), x.v.shape[-1]
        tokens, states = max(longest, int((rows[:, 2] - rows[:, 1]).max())), len(rows) * H
        self.few = states * K * V * dtype.itemsize * tokens < policy.FEW_BYTES
        share = -(-(1 if self.few else threads.num_threads()) // states)
        columns = min(V, max(1, -(-V // (share * policy.STEP_COLUMNS))) * policy.STEP_COLUMNS)
        columns = V if plan.average is not None else columns
        cell = cell_of(x, plan, columns, state is not None)
        self.layout = layout(cell, max(1, min(tokens, policy.STEP_TOKENS)))
        self.words, self.bytes, self.dtype = words_of(cell), self.layout.bytes + TABLE_BYTES, dtype.name
        direct = state is not None and state.dtype == dtype and state.strides[-1] == dtype.itemsize
        self.numbers: dict[str, Any] = numbers_of(plan) | {
            "V_all": V, "H": H, "columns": columns, "blocks": -(-V // columns), "direct": direct,
            "direct_v": is_direct(x.v, dtype)}  # fmt: skip
        load_pieces((step.step_tasks,), dtype.name, self.words)
        self.kernel = entry(step.step_tasks, dtype.name) if JIT else None
        self.each = H * self.numbers["blocks"]
        self.programs: tuple[Program | None, Program | None] = None, None
        self.whole: Any = None  # the kernel of array calls and steps
        self.take(rows, plan.pool_rows is None)

    def take(self, rows: np.ndarray, alone: bool = True) -> None:
        """The sequences to compute; alone: the state of each ends where it begins."""
        self.sequences, self.tasks = np.array(rows), len(rows) * self.each
        if alone:
            self.sequences[:, TO] = self.sequences[:, STATE]

    def settle(self, arrays: np.ndarray, sources: np.ndarray, extents: np.ndarray, count: int) -> None:
        """Keep the table: arrays; whose handle says where each lies (-1: the table); how far each reaches.

        The first `count` of those with handles are read, the next one is what is overwritten; 0: nothing is.
        """
        load_pieces((step.step_tasks,), self.dtype, self.words | conversions(arrays, self.dtype))
        table = self.layout.table.copy()
        self.kept = arrays, sources, extents, self.layout.own, self.sequences
        self.handles = len(extents)
        table[FIRST : FIRST + arrays.size] = arrays.ravel()
        put(STEPS, table, self.numbers | {
            "read_count": count, "handle_count": len(extents), "sequence_count": len(self.sequences),
            "own_count": len(self.layout.own), "source_count": len(sources), "sequences": self.sequences,
            "own": self.layout.own, "sources": sources, "extents": extents})  # fmt: skip
        self.table, self.at = table, address(table)

    def rotate(self, pairs: int) -> None:
        """Rotate the final state in the last pass, by the angles of the table."""
        self.numbers |= {"rotates": 1, "pairs": pairs}
        self.words |= {"rotates"}

    def between(self, before: Program | None, after: Program | None) -> None:
        """Array calls before and after."""
        self.programs = before, after
        if self.few and self.kernel is not None:
            load_pieces((step.step_between,), self.dtype, self.words)
            self.whole = entry(step.step_between, self.dtype)
            each = [(0, 0) if p is None else (p.at, p.count) for p in self.programs]
            self.told = np.array(each, np.int64)
            at = address(self.told)
            self.where = at, at + 16, next(p.buffer for p in self.programs if p is not None)

    def run(self, row: array[int], owners: Any) -> bool:
        """Execute the sequences of described arrays; False if what is overwritten shares memory with what is read.

        `owners` keeps the arrays alive.
        """
        at, told, (before, after) = self.at, place(row), self.programs
        if self.whole is not None:
            _held, own = scratch.take(self.bytes)
            self.whole(at, told, own, self.tasks, *self.where)
            return not row[self.handles]
        if before is not None:
            before.call(row)

        def task(first: int, last: int, owners: Any = (row, owners)) -> None:
            _held, own = scratch.take(self.bytes)
            if self.kernel is not None:
                self.kernel(at, told, own, first, last)
            else:
                step.step_tasks(PythonWorkspace(STEPS, self.table, self.dtype), told, own, first, last)

        if self.few:
            task(0, self.tasks)
        else:
            threads.run(task, self.tasks, threads.num_threads())
        done = not row[self.handles]
        if done and after is not None:
            after.call(row)
        return done


def run(x: Inputs, plan: Plan, table: Table, state: np.ndarray | None, rows: np.ndarray) -> None:
    """Execute the sequences in `rows` on arrays that lie where the table says."""
    _run(Steps(x, plan, state, rows), table)


def _run(steps: Steps, table: Table) -> None:
    steps.settle(table.numbers, np.full(len(table.numbers), -1), np.zeros((1, 2), np.int64), 0)
    steps.run(handles([table.numbers]), table)


def run_segments(x: Inputs, plan: Plan, table: Table, state: np.ndarray | None, rows: np.ndarray) -> np.ndarray:
    """The states at the ends of `rows`, which are segments: one of each sequence at a time.

    The rows of `chain` are of each sequence the initial state, then that after each segment.
    """
    first = rows[:, EARLIER] == 0
    number = np.cumsum(first) - 1  # of the sequence
    place = np.arange(len(rows))
    level = place - np.flatnonzero(first)[number]
    chain = np.zeros((len(rows) + count_sequences(rows), *state_shape(x, plan)), plan.dtype)
    if state is not None:
        chain[(place + number)[first]] = state.reshape(-1, *chain.shape[1:])[rows[first, STATE]]
    table.states("in_state", chain[:-1])
    table.states("out_state", chain[1:])
    own = rows.copy()
    own[:, STATE] = own[:, TO] = place + number
    steps = Steps(x, plan, chain, own[level == 0], int((own[:, 2] - own[:, 1]).max()))
    for n in range(int(level.max(initial=-1)) + 1):
        steps.take(own[level == n])
        _run(steps, table)
    return chain[1:][place + number]
