"""Short sequences in compiled loops: which take the recurrent form, and how it is shared out.

A form is chosen by the length of its own sequence: the same sequence gives the same bits alone and among others.
"""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np

from ....runtime import threads
from ... import policy
from ...types import Decay, Erase, Inputs, Plan
from ..memory import address, handles, place
from ..table import ARRAYS, Table
from .step import step_tasks
from .step_table import BLOCKS, QUERIES, TOKENS, layout, memory, sizes

BLOCK = 128  # value columns: a state is shared out in multiples of it
FEW_BYTES = 2**22  # of states that go by; below, threads cost more than they give


def is_stepwise(x: Inputs, plan: Plan, rows: np.ndarray) -> np.ndarray:
    """Whether each sequence is walked token by token: asked for, or short, or in no other form."""
    if plan.features is not None or plan.average is not None:
        return np.zeros(len(rows), bool)  # mapped in programs, which chunks alone are
    if plan.chunk_size == 1 or is_only_stepwise(x):
        return np.ones(len(rows), bool)
    plain = x.erase is Erase.NONE and x.decay is not Decay.VECTOR
    short = policy.SHORT_CPU_PLAIN if plain else policy.SHORT_CPU
    return (rows[:, 2] - rows[:, 1] <= short) & (plan.chunk_size is None)


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

    def __init__(self, x: Inputs, plan: Plan, state: np.ndarray | None, rows: np.ndarray):
        dtype, H, K, V = np.dtype(plan.dtype), x.v.shape[-2], x.k.shape[-1], x.v.shape[-1]
        tokens, states = int((rows[:, 2] - rows[:, 1]).max()), len(rows) * H
        self.few = states * K * V * dtype.itemsize * tokens < FEW_BYTES
        share = -(-(1 if self.few else threads.num_threads()) // states)
        columns = min(V, max(1, -(-V // (share * BLOCK))) * BLOCK)
        n = sizes(x, plan, state, columns)
        w, self.bytes = layout(K, int(n[QUERIES]), min(tokens, TOKENS), dtype.itemsize)
        self.kernel = step_tasks(dtype)
        self.tasks = states * int(n[BLOCKS])
        self.kept: tuple[np.ndarray, ...] = (n, np.ascontiguousarray(rows), w)
        self.scale = np.array([plan.scale], dtype)

    def settle(self, arrays: np.ndarray, told: np.ndarray, count: int, handles: int) -> None:
        """Keep the tables: of arrays; where each lies and how far each reaches; how many are read, of how many."""
        self.kept = arrays, told, *self.kept[-3:], self.scale
        self.handles = handles
        self.tables = np.array([*map(address, self.kept), count, handles])
        self.at = address(self.tables)

    def run(self, row: array[int], owners: Any) -> bool:
        """Walk the sequences of described arrays; False if what is overwritten shares memory with what is read.

        `owners` keeps the arrays alive.
        """
        at, told = self.at, place(row)

        def task(first: int, last: int, owners: Any = (row, owners)) -> None:
            _held, own = memory(self.bytes)
            self.kernel(at, told, own, first, last)

        if self.few:
            task(0, self.tasks)
        else:
            threads.run(task, self.tasks, threads.num_threads())
        return not row[self.handles]


def run(x: Inputs, plan: Plan, table: Table, state: np.ndarray | None, rows: np.ndarray) -> None:
    """Walk the sequences in `rows` of arrays that lie where the table says."""
    alone, steps = np.full(ARRAYS + 2, -1, np.int64), Steps(x, plan, state, rows)
    alone[ARRAYS:] = 0
    steps.settle(table.numbers, alone, 0, 1)
    steps.run(handles([table.numbers]), table)
