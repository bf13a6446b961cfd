"""Rows of a table, and rows added to those of a table, in compiled loops; sums have the order of the rows."""

from __future__ import annotations

import numpy as np

from ...runtime.pieces.memory import empty
from ...runtime.pieces.piece import Whole, piece, workspace_kind
from ...runtime.pieces.run import over_matrices
from ...runtime.pieces.tiles import copy_row
from ...runtime.pieces.views import numbers_at, row, start_of
from ...runtime.pieces.workspace import Matrix as Field
from ...runtime.pieces.workspace import Workspace
from .loops import over
from .row_norms import plus, rows_of
from .rows import fill

EACH = 512  # channels of a task of sums
BLOCK = 2**15  # numbers of a task of rows
TABLE = Workspace("scatter", ("count", "D", "V", "each"), (), (), {"given": {
    "x": Field("count", "D"), "table": Field("V", "D"), "ids": Field("count", dtype="int64")}})  # fmt: skip
Work = workspace_kind(TABLE)


@piece
def gathered(w: Work, begin: Whole, end: Whole):
    """x_r = table_{ids_r}"""
    for r in range(begin * w.each, min(end * w.each, w.count)):
        copy_row(row(w.table, w.ids[r]), row(w.x, r), w.D)


@piece
def added(w: Work, begin: Whole, end: Whole):
    """table_v = the sum of x_r over all r with ids_r = v; a task is a block of channels."""
    for first in range(begin * EACH, min(end * EACH, w.D), EACH):
        n, size = min(EACH, w.D - first), w.x.itemsize
        for v in range(w.V):
            fill(numbers_at(w.x, start_of(w.table, v) + first * size, n), 0.0)
        for r in range(w.count):
            to = numbers_at(w.x, start_of(w.table, w.ids[r]) + first * size, n)
            over(plus, to, numbers_at(w.x, start_of(w.x, r) + first * size, n), to, 0, to)


def rows_at(table: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """(R, D): the rows of a table with the numbers ids (R,), in 0..V - 1."""
    (V, D), count = table.shape, len(ids)
    out, each = empty((count, D), table.dtype), max(BLOCK // D, 1)
    held = {"x": out, "table": rows_of(table, D), "ids": np.ascontiguousarray(ids, np.int64)}
    over_matrices(gathered, TABLE, {"count": count, "D": D, "V": V, "each": each} | held, -(-count // each),
                  table.dtype.name)  # fmt: skip
    return out


def add_rows(x: np.ndarray, ids: np.ndarray, V: int) -> np.ndarray:
    """(V, D): the sums of the rows x (R, D) with each of the numbers ids (R,), in 0..V - 1."""
    (count, D), out = x.shape, empty((V, x.shape[1]), x.dtype)
    held = {"x": rows_of(x, D), "table": out, "ids": np.ascontiguousarray(ids, np.int64)}
    over_matrices(added, TABLE, {"count": count, "D": D, "V": V} | held, -(-D // EACH), x.dtype.name)
    return out
