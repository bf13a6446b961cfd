"""Sums over axes along which an array was stretched, in compiled loops: the transpose of broadcasting."""

from __future__ import annotations

from math import prod

import numpy as np

from ...runtime.pieces.memory import empty
from ...runtime.pieces.piece import Whole, piece, workspace_kind
from ...runtime.pieces.run import over_matrices
from ...runtime.pieces.tiles import copy_row
from ...runtime.pieces.views import row
from ...runtime.pieces.workspace import Matrix, Workspace

SMALL = 2**15  # numbers that one thread adds
BLOCK = 64  # terms that are added one by one; of more there are sums of sums
SUMS = Workspace("sums", ("terms", "blocks", "each"), (), (), {"given": {
    "x": Matrix("all", "width"), "out": Matrix("count", "width")}})  # fmt: skip
Work = workspace_kind(SUMS)


@piece
def summed(w: Work, first: Whole, last: Whole):
    """Sums of `each` of the `terms` rows of x: out_n of block n % blocks of sum n // blocks."""
    for n in range(first, last):
        out, begin = row(w.out, n), n % w.blocks * w.each
        at = n // w.blocks * w.terms + begin
        copy_row(row(w.x, at), out, len(out))
        for i in range(1, min(w.each, w.terms - begin)):
            x = row(w.x, at + i)
            for j in range(len(out)):
                out[j] += x[j]


def over_first(x: np.ndarray) -> np.ndarray:
    """x (count, terms, width) in C order, summed over its terms: (count, width)."""
    while (terms := x.shape[1]) > 1:
        count, width, blocks = x.shape[0], x.shape[2], -(-terms // BLOCK)
        out = empty((count * blocks, width), x.dtype)
        sizes = {"terms": terms, "blocks": blocks, "each": BLOCK, "all": count * terms, "count": len(out),
                 "width": width}  # fmt: skip
        arrays = {"x": x.reshape(-1, width), "out": out}
        over_matrices(summed, SUMS, sizes | arrays, len(out), x.dtype.name, is_small=x.size <= SMALL)
        x = out.reshape(count, blocks, width)
    return x[:, 0]


def over_tokens(x: np.ndarray, axes: int = 1) -> np.ndarray:
    """The sum of x, in C order, over all axes but the last ones."""
    lead = x.ndim - axes
    return over_first(x.reshape(1, prod(x.shape[:lead]), prod(x.shape[lead:]))).reshape(x.shape[lead:])


def sum_to(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """x, in C order, summed over the axes along which `shape` was stretched to x.shape."""
    lead = x.ndim - len(shape)
    for n, size in enumerate(x.shape):
        if x.size and size > 1 and (n < lead or shape[n - lead] == 1):
            x = over_first(x.reshape(prod(x.shape[:n]), size, prod(x.shape[n + 1 :]))).reshape(
                (*x.shape[:n], 1, *x.shape[n + 1 :])
            )
    return x.reshape(shape)
