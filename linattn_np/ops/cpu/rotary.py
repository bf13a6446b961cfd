"""Rotations of ops/rotary.py in compiled loops, as kernels among traced array calls.

    (even, odd) <- (even c - odd s, even s + odd c)

Products are rounded before they are added, as in array calls: both have the same bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...runtime.pieces.piece import Matrix, Number, Vector, Whole, piece, workspace_kind
from ...runtime.pieces.registers import times
from ...runtime.pieces.run import over_matrices
from ...runtime.pieces.tiles import copy_row
from ...runtime.pieces.views import row, rows
from ...runtime.pieces.workspace import Matrix as M
from ...runtime.pieces.workspace import Workspace
from ...runtime.tracing import Trace, Untraceable, plain

ROTATION = Workspace("rotation", ("count", "K", "P", "width", "copies", "two"), (), (), {"given": {
    "x": M("count", "width"), "angle": M("two", "P"), "out": M("count", "width")}})  # fmt: skip
Work = workspace_kind(ROTATION)


@piece
def rotate_pair(x: Vector, y: Vector, c: Number, s: Number):
    """(x, y) <- (x c - y s, x s + y c)"""
    for j in range(len(x)):
        even, odd = x[j], y[j]
        x[j] = times(even, c) - times(odd, s)
        y[j] = times(even, s) + times(odd, c)


@piece
def rotate_row(x: Vector, c: Vector, s: Vector):
    """The pairs (2 p, 2 p + 1) of a row."""
    for p in range(len(c)):
        even, odd = x[2 * p], x[2 * p + 1]
        x[2 * p] = times(even, c[p]) - times(odd, s[p])
        x[2 * p + 1] = times(even, s[p]) + times(odd, c[p])


@piece
def rotate_rows(w: Work, first: Whole, last: Whole):
    """Pairs of the K rows of each of the states first..last."""
    c, s = row(w.angle, 0), row(w.angle, 1)
    for n in range(first, last):
        X, out = rows(w.x, n * w.K, w.K), rows(w.out, n * w.K, w.K)
        copy_rows(X, out, w.copies)
        for p in range(w.P):
            rotate_pair(row(out, 2 * p), row(out, 2 * p + 1), c[p], s[p])


@piece
def rotate_columns(w: Work, first: Whole, last: Whole):
    """Pairs of columns of the rows first..last."""
    for n in range(first, last):
        copy_rows(rows(w.x, n, 1), rows(w.out, n, 1), w.copies)
        rotate_row(row(w.out, n), row(w.angle, 0), row(w.angle, 1))


@piece
def copy_rows(X: Matrix, out: Matrix, copies: Whole):
    """out = X, unless it is X."""
    for i in range(len(X) if copies else 0):
        copy_row(row(X, i), row(out, i), X.shape[1])


def columns_rotated(trace: Trace, x: Any, angle: Any) -> Any:
    """Traced x (..., K) with pairs of channels rotated; angle (2, P): cosines and sines."""
    rows = trace.dense(x, x.dtype).reshape(-1, x.shape[-1])
    return _rotated(trace, rotate_columns, rows, 1, angle).reshape(x.shape)


def rows_rotated(trace: Trace, S: Any, angle: Any) -> Any:
    """Traced S (..., K, V) with pairs of rows rotated: in place where the trace owns S."""
    K, V = S.shape[-2:]
    rows = plain(S).reshape(-1, V)
    is_view = np.may_share_memory(rows, plain(S)) and rows.strides[-1] == S.itemsize
    if is_view and trace.owns(S):
        return _rotated(trace, rotate_rows, rows, K, angle, S)
    rows = trace.dense(S, S.dtype).reshape(-1, V)
    return _rotated(trace, rotate_rows, rows, K, angle).reshape(S.shape)


def _rotated(trace: Trace, kernel: Any, x: Any, K: int, angle: Any, own: Any = None) -> Any:
    """The kernel's call on rows x, K of them at a time; own: the array of these rows, if they are overwritten."""
    if x.dtype.name not in ("float32", "float64"):
        raise Untraceable("a rotation of numbers of 16 bits")
    out = trace.new(x.shape, x.dtype) if own is None else x
    sizes = {"count": len(x), "K": K, "P": angle.shape[1], "width": x.shape[1], "copies": own is None, "two": 2}
    values = sizes | {"x": x, "angle": angle, "out": out}
    found = over_matrices(kernel, ROTATION, values, len(x) // K, x.dtype.name, trace, computes=own is None)
    return found if own is None else own
