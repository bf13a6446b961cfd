"""The table of a call's arrays: where each lies, a row each, with strides, heads that share a head, storage dtype."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...ops.map_steps import Tables
from ...runtime.arrays import dtype_name
from ...runtime.compiled.rows import STORAGE as STORAGES
from ..types import Inputs, Plan
from .interpreter.machine import AT, SHARED
from .interpreter.program import CHUNKS, FIRST, INPUTS, STOP
from .memory import address

IN_Q, IN_K, IN_V, IN_G, IN_READ, IN_BETA, IN_PUSH, IN_BONUS, IN_STATE, OUT, OUT_STATE = range(11)
IN_DOUT, IN_DSTATE, OUT_DQ, OUT_DK, OUT_DV, OUT_DG, OUT_DREAD, OUT_DBETA, OUT_DPUSH, OUT_DBONUS, OUT_DSTATE = range(
    11, 22
)
IN_FADE, STARTS, ENDS = 22, 23, 24  # STARTS, ENDS: states, and their gradients, between strips
IN_MAP, IN_MAP_TURNED, IN_NUMBERS, IN_SEGMENTS = range(25, 29)  # of a feature map: W, W^T, the rest
IN_EPS, OUT_SUMS = 29, 30  # of a division by sums of weights
OUT_DFADE = 31
ARRAYS = 32


class Table:
    """Rows of `numbers`; keeps the arrays alive."""

    def __init__(self, x: Inputs):
        self.numbers = np.zeros((ARRAYS, 7), np.int64)
        self.numbers[:, SHARED] = 1
        self.kept: dict[int, Any] = {}
        self.H = x.v.shape[-2]
        self.asking = self.H if x.q is None else max(self.H, x.q.shape[-2])
        self.tokens(IN_Q, x.q, self.asking)
        for name, y in ((IN_K, x.k), (IN_V, x.v), (IN_G, x.g), (IN_READ, x.r if x.a is None else x.a),
                        (IN_BETA, x.beta), (IN_PUSH, x.b), (IN_FADE, x.gv)):  # fmt: skip
            self.tokens(name, y, self.H)
        if x.u is not None:
            self._put(IN_BONUS, x.u, (0, 0, *x.u.strides), self.H // x.u.shape[0])

    def tokens(self, name: int, y: np.ndarray | None, heads: int) -> None:
        """An array (..., T, H', D) for `heads` heads; one batch row, or none, is shared by the batch."""
        if y is None:
            return
        y = y.reshape((-1, *y.shape[-3:]))
        steps = (0, *y.strides[1:]) if y.shape[0] == 1 else y.strides
        self._put(name, y, steps, heads // y.shape[-2])

    def states(self, name: int, y: np.ndarray | None) -> None:
        """An array (..., H, K, V): rows of the state take the place of tokens."""
        if y is None:
            return
        y = y.reshape((-1, *y.shape[-3:]))
        batch, head, k, v = y.strides
        self._put(name, y, (batch, k, head, v), 1)

    def constants(self, tables: Tables) -> None:
        """Tables of a feature map, the same for every token and head."""
        for name, y in ((IN_MAP, tables.W), (IN_MAP_TURNED, tables.WT), (IN_NUMBERS, tables.numbers[None])):
            if y is not None:
                self.constant(name, y)
        if tables.segments is not None:
            self.kept[IN_SEGMENTS] = tables.segments
            self.numbers[IN_SEGMENTS, AT] = address(tables.segments)

    def constant(self, name: int, y: np.ndarray) -> None:
        """A matrix, the same for every batch row and head: its rows take the place of tokens."""
        self._put(name, y, (0, y.strides[0], 0, y.strides[1]), 1)

    def _put(self, name: int, y: np.ndarray, steps: tuple[int, ...], shared: int) -> None:
        self.kept[name] = y
        at = y.__array_interface__["data"][0]
        self.numbers[name] = (at, *steps, shared, STORAGES[dtype_name(y)])

    def direct(self, names: tuple[int, ...], dtype: np.dtype, lane: int) -> frozenset[int]:
        """Arrays that products can read where they lie: the dtype of the computation, rows of whole vectors."""
        size = dtype.itemsize
        return frozenset(
            name for name in names
            if name in self.kept and (y := self.kept[name]).dtype == dtype and y.strides[-1] == size
            and y.shape[-1] % lane == 0 and y.strides[-3] % size == 0 and self.numbers[name, AT] % size == 0
        )  # fmt: skip


def sequences(plan: Plan, batch: int, chunk: int) -> np.ndarray:
    """Rows (batch row, start, stop, row of the state, 0, 0, 0, chunks, 0)."""
    if plan.sequences and plan.sequences[0].row is None:
        start, stop = plan.sequences[0][1:]
        rows = [(b, start, stop, b) for b in range(batch)]
    else:
        rows = [(0, s.start, s.stop, s.row or 0) for s in plan.sequences]
    table = np.zeros((len(rows), INPUTS), np.int64)
    if rows:
        table[:, :4] = rows
        table[:, CHUNKS] = -(-(table[:, STOP] - table[:, FIRST]) // chunk)
    return table
