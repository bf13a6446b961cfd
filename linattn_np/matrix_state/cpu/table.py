"""The arrays of a call as rows of a workspace's table: address, steps, heads that share one, storage, shape."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...runtime.pieces.run import stored_array
from ...runtime.pieces.workspace import ARRAY, SHARED
from ...runtime.recorder import constant
from ...runtime.shapes import segments
from ..types import Inputs, Plan
from .workspace import ARRAYS, TASK

BATCH, FIRST, STOP, STATE, HEAD, COLUMN, WIDTH, EARLIER, LATER, FROM, TO, AT = range(len(TASK))
ROW = {name: n for n, name in enumerate(ARRAYS)}


class Table:
    """Rows of `numbers`; keeps the arrays alive."""

    def __init__(self, x: Inputs):
        self.numbers = np.zeros((len(ARRAYS), ARRAY), np.int64)
        self.numbers[:, SHARED] = 1
        self.arrays: dict[str, Any] = {}
        self.H = x.v.shape[-2]
        self.query_heads = self.H if x.q is None else max(self.H, x.q.shape[-2])
        self.tokens("in_q", x.q, self.query_heads)
        for name, y in (("in_k", x.k), ("in_v", x.v), ("in_g", x.g), ("in_r", x.r if x.a is None else x.a),
                        ("in_beta", x.beta), ("in_b", x.b), ("in_gv", x.gv)):  # fmt: skip
            self.tokens(name, y, self.H)
        if x.A_log is not None:
            self._put("in_A_log", x.A_log[None, None, :, None], (0, 0, *x.A_log.strides, 0), self.H // len(x.A_log))
        if x.bias is not None:
            self._put("in_bias", x.bias[None, None], (0, 0, *x.bias.strides), self.H // len(x.bias))
        if x.u is not None:
            self._put("in_u", x.u.reshape((1, 1, *x.u.shape)), (0, 0, *x.u.strides), self.H // x.u.shape[0])

    def tokens(self, name: str, y: np.ndarray | None, heads: int) -> None:
        """An array (..., T, H', D) for `heads` heads; one batch row, or none, is shared by the batch."""
        if y is None:
            return
        y = y.reshape((-1, *y.shape[-3:]))
        steps = (0, *y.strides[1:]) if y.shape[0] == 1 else y.strides
        self._put(name, y, steps, heads // y.shape[-2])

    def states(self, name: str, y: np.ndarray | None) -> None:
        """An array (..., H, K, V): rows of the state take the place of tokens."""
        if y is None:
            return
        y = y.reshape((-1, *y.shape[-3:])).swapaxes(1, 2)
        self._put(name, y, y.strides, 1)

    def of_plan(self, x: Inputs, plan: Plan) -> None:
        """What a feature map and a division by sums need."""
        if plan.features is not None:
            tables = plan.features.tables(x.k.shape[-1], np.dtype(plan.dtype))
            for name, y in (("in_map", tables.W), ("in_map_T", tables.WT), ("in_numbers", tables.numbers[None]),
                            ("in_segments", tables.segments)):  # fmt: skip
                self.constant(name, y)
        if plan.average is not None:
            self.tokens("out_sums", plan.average.sums, self.query_heads)

    def constant(self, name: str, y: np.ndarray | None) -> None:
        """A matrix, the same for every batch row and head: its rows take the place of tokens."""
        if y is not None:
            self._put(name, constant(y)[None, :, None], (0, y.strides[0], 0, y.strides[1]), 1)

    def _put(self, name: str, y: np.ndarray, steps: tuple[int, ...], shared: int) -> None:
        self.arrays[name] = y
        self.numbers[ROW[name]] = stored_array(y, steps, max(shared, 1))


def is_direct(y: np.ndarray | None, dtype: Any) -> bool:
    """Whether compiled code can read rows where they lie: the dtype of the computation, numbers side by side."""
    size = np.dtype(dtype).itemsize
    return y is not None and y.dtype == dtype and y.strides[-1] == size and not any(s % size for s in y.strides)


def sequences(plan: Plan, batch: int) -> np.ndarray:
    """Rows of tasks, one per sequence, or one per segment of it if there are positions.

    BATCH, FIRST and STOP; STATE, TO: rows of the sequence's initial and its final state; EARLIER and LATER: whether a
    segment of the same sequence is the row before or after; AT: 1 + row of the states at positions of the position that
    it ends at, else 0.
    """
    if not plan.is_ragged:
        each = len(plan.states_at or ())
        owners = [(b, b, b * each, plan.sequences[0]) for b in range(batch)]
    else:
        owners = [(0, s.row or 0, 0, s) for s in plan.sequences]
    rows = []
    for b, state, first, sequence in owners:
        cuts = segments(sequence, plan.states_at or ())
        rows += [(b, s.start, s.stop, state, n > 0, n < len(cuts) - 1, first + s.at + 1 if s.at >= 0 else 0)
                 for n, s in enumerate(cuts)]  # fmt: skip
    table = np.zeros((len(rows), len(TASK)), np.int64)
    if rows:
        table[:, (BATCH, FIRST, STOP, STATE, EARLIER, LATER, AT)] = rows
        table[:, TO] = table[:, STATE]
    return table


def count_sequences(rows: np.ndarray) -> int:
    """The number of sequences of rows."""
    return len(rows) - int(rows[:, LATER].sum())


def lengths(rows: np.ndarray) -> np.ndarray:
    """Of each row the tokens of its sequence."""
    first, last = np.flatnonzero(rows[:, EARLIER] == 0), np.flatnonzero(rows[:, LATER] == 0)
    return np.repeat(rows[last, STOP] - rows[first, FIRST], last - first + 1)


def from_pool(rows: np.ndarray, pool_rows: np.ndarray, in_place: bool) -> None:
    """Let sequences begin with rows of a pool, and end with them if it is overwritten in place."""
    rows[:, STATE] = np.asarray(pool_rows)[rows[:, STATE]]
    if in_place:
        rows[:, TO] = rows[:, STATE]
