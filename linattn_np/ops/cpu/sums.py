"""Sums over axes along which an array was stretched, in compiled loops: the transpose of broadcasting."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from ...runtime.arrays import sum_to as by_array_calls
from ...runtime.pieces.memory import empty
from ...runtime.pieces.piece import Whole, piece, workspace_kind
from ...runtime.pieces.run import over_matrices
from ...runtime.pieces.tiles import copy_row
from ...runtime.pieces.views import row
from ...runtime.pieces.workspace import Matrix, Workspace

MOST = 64  # terms that are added one by one; more need sums of sums
SUMS = Workspace("sums", ("terms",), (), (), {"given": {
    "x": Matrix("all", "width"), "out": Matrix("count", "width")}})  # fmt: skip
Work = workspace_kind(SUMS)


@piece
def summed(w: Work, first: Whole, last: Whole):
    """out_n = the sum of rows n terms to (n + 1) terms of x."""
    for n in range(first, last):
        out = row(w.out, n)
        copy_row(row(w.x, n * w.terms), out, len(out))
        for i in range(1, w.terms):
            x = row(w.x, n * w.terms + i)
            for j in range(len(out)):
                out[j] += x[j]


def sum_to(xp: Any, x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """x summed over the axes along which `shape` was stretched to x.shape."""
    if x.shape == shape:
        return x
    lead = x.ndim - len(shape)
    axes = [n for n, size in enumerate(x.shape) if n < lead or (size > 1 and shape[n - lead] == 1)]
    if not x.size or not x.flags.c_contiguous or max(x.shape[n] for n in axes) > MOST:
        return by_array_calls(xp, x, shape)
    for n in axes:
        if (terms := x.shape[n]) > 1:
            before, width = prod(x.shape[:n]), prod(x.shape[n + 1 :])
            out = empty((*x.shape[:n], 1, *x.shape[n + 1 :]), x.dtype)
            given = {"x": x.reshape(-1, width), "out": out.reshape(-1, width)}
            sizes = {"terms": terms, "all": before * terms, "count": before, "width": width}
            over_matrices(summed, SUMS, sizes | given, before, x.dtype.name)
            x = out
    return x.reshape(shape)
