"""Rows of queries and keys divided by their length in compiled loops, and the transpose, one pass over each row."""

from __future__ import annotations

from math import sqrt
from typing import Any

import numpy as np

from ...ops.cpu.formulas import dense
from ...ops.cpu.rows import unit_rows as divide
from ...ops.cpu.rows import unit_rows_vjp as divide_vjp
from ...runtime.pieces.memory import empty
from ...runtime.pieces.piece import Whole, piece, workspace_kind
from ...runtime.pieces.run import over_matrices
from ...runtime.pieces.views import rows
from ...runtime.pieces.workspace import Matrix, Workspace
from ..policy import UNIT_ELEMENTS
from ..preprocess import Rows
from ..types import Plan

ROWS = Workspace("rows", ("count", "n", "each", "transposed"), ("root",), (),
                 {"given": {name: Matrix("count", "n") for name in ("x", "dy", "out")}})  # fmt: skip
Work = workspace_kind(ROWS)


@piece
def divided(w: Work, first: Whole, last: Whole):
    """Tasks first..last of `each` rows: out_i = x_i / n_i, n_i^2 = |x_i|^2 + root^2, or its transpose.

    out_i = (dy_i - x_i (x_i . dy_i) / n_i^2) / n_i
    """
    begin, count = first * w.each, min(last * w.each, w.count) - first * w.each
    x, out = rows(w.x, begin, count), rows(w.out, begin, count)
    if w.transposed:
        divide_vjp(x, rows(w.dy, begin, count), out, w.root)
    else:
        divide(x, out, w.root)


def unit_rows(plan: Plan, rows: Rows) -> Rows:
    """Rows divided by their length, in the dtype of the computation."""
    return tuple(_over_rows(plan, y) for y in rows)


def unit_rows_vjp(plan: Plan, rows: Rows, grads: Rows) -> Rows:
    """The transpose, for those rows that are given."""
    return tuple(_over_rows(plan, y, dy) for y, dy in zip(rows, grads, strict=True))


def _over_rows(plan: Plan, y: Any, dy: Any = None) -> np.ndarray | None:
    """Rows of whole arrays divided, or the transpose, None of None; threads share the rows."""
    if y is None:
        return None
    dtype, n = np.dtype(plan.dtype), y.shape[-1]
    arrays = {name: dense(x, dtype) for name, x in (("x", y), ("dy", dy)) if x is not None}
    out = arrays["out"] = empty(y.shape, dtype)
    if not out.size:
        return out
    count, each = out.size // n, max(UNIT_ELEMENTS // n, 1)
    sizes = {"count": count, "n": n, "each": each, "transposed": dy is not None, "root": sqrt(plan.l2norm_eps)}
    over_matrices(divided, ROWS, sizes | arrays, -(-count // each), dtype.name)
    return out
