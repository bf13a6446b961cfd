"""Rows of queries and keys divided by their length in compiled loops, and the transpose, one pass over each row."""

from __future__ import annotations

import functools
from math import sqrt
from typing import Any

import numpy as np

from ...ops.cpu.lengths import unit_rows as divide
from ...ops.cpu.lengths import unit_rows_vjp as divide_vjp
from ...runtime.pieces.memory import first_byte
from ...runtime.pieces.piece import Whole, load_pieces, piece, workspace_kind
from ...runtime.pieces.run import call_of, over_tasks, put
from ...runtime.pieces.views import rows
from ...runtime.pieces.workspace import Matrix, Workspace
from ...runtime.tracing import Kernel, traced
from ..policy import UNIT_ELEMENTS
from ..preprocess import Rows
from ..types import Plan

ROWS = Workspace("rows", ("count", "n", "each"), ("root",), (),
                 {"given": {name: Matrix("count", "n") for name in ("x", "dy", "out")}})  # fmt: skip
Work = workspace_kind(ROWS)
PLACES = tuple(ROWS.slots[name] for name in ("x", "dy", "out"))


@piece
def divided(w: Work, first: Whole, last: Whole):
    """out_i = x_i / n_i, n_i^2 = |x_i|^2 + root^2, for tasks first..last of `each` rows."""
    begin, end = first * w.each, min(last * w.each, w.count)
    divide(rows(w.x, begin, end - begin), rows(w.out, begin, end - begin), w.root)


@piece
def divided_vjp(w: Work, first: Whole, last: Whole):
    """out_i = (dy_i - x_i (x_i . dy_i) / n_i^2) / n_i, likewise."""
    begin, end = first * w.each, min(last * w.each, w.count)
    divide_vjp(rows(w.x, begin, end - begin), rows(w.dy, begin, end - begin), rows(w.out, begin, end - begin),
               w.root)  # fmt: skip


def unit_rows(plan: Plan, rows: Rows) -> Rows:
    """Rows divided by their length, in the dtype of the computation."""
    return tuple(_over_rows(divided, plan, y) for y in rows)


def unit_rows_vjp(plan: Plan, rows: Rows, grads: Rows) -> Rows:
    """The transpose, for those rows that are given."""
    return tuple(_over_rows(divided_vjp, plan, y, dy) for y, dy in zip(rows, grads, strict=True))


def _over_rows(kernel: Any, plan: Plan, *arrays: Any) -> np.ndarray | None:
    """A function of rows on whole arrays, None of None; threads share the rows."""
    if arrays[0] is None:
        return None
    trace = traced(arrays[0])
    if trace is None:
        arrays = tuple(np.ascontiguousarray(y, plan.dtype) for y in arrays)
    else:
        arrays = tuple(trace.dense(y, np.dtype(plan.dtype)) for y in arrays)
    out = (np.empty if trace is None else trace.new)(arrays[0].shape, plan.dtype)
    if not out.size:
        return out
    n, dtype = out.shape[-1], np.dtype(plan.dtype)
    known, tasks, call = _kernel(kernel, dtype, out.size // n, n, plan.l2norm_eps)
    table = known.copy()
    for place, y in zip(PLACES, (arrays[0], arrays[-1], out), strict=True):
        table[place] = first_byte(y)
    over_tasks(call, table, tasks, (arrays, out))
    if trace is None:
        return out
    return trace.kernel(Kernel(kernel.piece.addresses[dtype.name], table, PLACES, (arrays[0], arrays[-1], out), tasks))


@functools.lru_cache(maxsize=64)
def _kernel(kernel: Any, dtype: np.dtype, count: int, n: int, eps: float) -> tuple[np.ndarray, int, Any]:
    """(table without addresses, tasks, loaded kernel) for `count` rows of n numbers."""
    load_pieces((kernel,), dtype.name)
    each = max(UNIT_ELEMENTS // n, 1)
    sizes = {"count": count, "n": n, "each": each, "root": sqrt(eps)}
    table = put(ROWS, np.zeros(ROWS.size, np.int64), sizes)
    table[[at + 1 for at in PLACES]] = n * dtype.itemsize
    return table, -(-count // each), call_of(kernel, ROWS, dtype.name)
