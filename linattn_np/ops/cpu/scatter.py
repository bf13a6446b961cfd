"""Rows added to those of a table in compiled loops: a task is a block of channels, the order is that of the rows."""

from __future__ import annotations

import numpy as np

from ...runtime.pieces.piece import Whole, piece, workspace_kind
from ...runtime.pieces.run import over_matrices
from ...runtime.pieces.views import numbers_at, start_of
from ...runtime.pieces.workspace import Matrix as Field
from ...runtime.pieces.workspace import Workspace
from .loops import over
from .row_norms import plus, rows_of

EACH = 512  # channels of a task
TABLE = Workspace("scatter", ("count", "D", "V"), (), (), {"given": {
    "x": Field("count", "D"), "out": Field("V", "D"), "ids": Field("count", dtype="int64")}})  # fmt: skip
Work = workspace_kind(TABLE)


@piece
def added(w: Work, begin: Whole, end: Whole):
    """out_{ids_r} += x_r"""
    for first in range(begin * EACH, min(end * EACH, w.D), EACH):
        n, size = min(EACH, w.D - first), w.x.itemsize
        for r in range(w.count):
            to = numbers_at(w.x, start_of(w.out, w.ids[r]) + first * size, n)
            over(plus, to, numbers_at(w.x, start_of(w.x, r) + first * size, n), to, 0, to)


def add_rows(x: np.ndarray, ids: np.ndarray, V: int) -> np.ndarray:
    """(V, D): the sums of the rows x (R, D) with each of the numbers ids (R,), in 0..V - 1."""
    (count, D), out = x.shape, np.zeros((V, x.shape[1]), x.dtype)
    held = {"x": rows_of(x, D), "out": out, "ids": np.ascontiguousarray(ids, np.int64)}
    over_matrices(added, TABLE, {"count": count, "D": D, "V": V} | held, -(-D // EACH), x.dtype.name)
    return out
