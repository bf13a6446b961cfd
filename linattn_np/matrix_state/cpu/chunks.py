"""A call of the chunk form in compiled loops, forward: its cell, its program, its tasks."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...runtime import threads
from .. import policy
from ..types import Erase, Inputs, Plan, ReadState
from .chunk import Cell
from .features import features_of
from .forward import forward_program
from .run import run
from .strips import strips
from .table import IN_K, IN_Q, IN_READ, IN_V, Table

BLOCK = 32  # value columns: a state is shared out in multiples of it


class Chunks:
    """All of a call but where its arrays lie."""

    def __init__(self, x: Inputs, plan: Plan, table: Table, rows: np.ndarray, started: bool, kept: int = 0):
        H, V = x.v.shape[-2:]
        states, count = len(rows) * H, threads.num_threads()
        columns = V if plan.average is not None else columns_of(V, states, count)
        cell = cell_of(x, plan, table, columns, started)
        self.program, self.scale = forward_program(cell), plan.scale
        self.tasks, self.bounds = strips(rows, H, V, columns, cell.C, max(1, states // count), kept)
        self.operations = 6.0 * tokens(rows) * H * cell.K * V

    def run(self, numbers: np.ndarray, owners: Any) -> None:
        """Output and final state, where the table says; `owners` keeps its arrays alive."""
        run(self.program, self.scale, numbers, self.tasks, self.bounds, self.operations, owners)


def cell_of(x: Inputs, plan: Plan, table: Table, columns: int, started: bool) -> Cell:
    """The kind of a call whose tasks have so many value columns."""
    dtype = np.dtype(plan.dtype)
    mapped = None if plan.features is None else features_of(plan.features, x.k.shape[-1], dtype)
    where = (IN_Q, IN_V, IN_READ) if mapped is None else (IN_Q, IN_K, IN_V)
    direct = table.direct(where, dtype, 64 // dtype.itemsize)
    free = x.erase is Erase.FREE
    return Cell(
        dtype.name, key_width(x, plan), columns, policy.cpu_chunk(plan, x.v.shape[-3]), x.decay, x.erase,
        plan.query_reads is ReadState.PREVIOUS, free or plan.erase_reads is ReadState.PREVIOUS,
        free or not plan.erases_key, x.q is not None,
        1 if x.q is None else max(1, x.q.shape[-2] // table.H), x.u is not None, started, direct, mapped,
        x.gv is not None, plan.average is not None,
    )  # fmt: skip


def key_width(x: Inputs, plan: Plan) -> int:
    """Channels of the keys as the state has them."""
    K = x.k.shape[-1]
    return K if plan.features is None else plan.features.width(K)


def state_shape(x: Inputs, plan: Plan) -> tuple[int, int, int]:
    """(H, K, V) of a state."""
    return x.v.shape[-2], key_width(x, plan), x.v.shape[-1] + (plan.average is not None)


def columns_of(V: int, states: int, count: int) -> int:
    """Value columns of a task: all, or fewer where there are fewer states than threads."""
    share = -(-count // max(states, 1))
    return min(V, max(1, -(-V // (share * BLOCK))) * BLOCK) if share > 1 else V


def tokens(rows: np.ndarray) -> int:
    """Tokens of all sequences."""
    return int((rows[:, 2] - rows[:, 1]).sum())
