"""The end of a mini-batch and its transpose, and states as rows: of the last layer, and of a hidden one."""

from __future__ import annotations

from ...ops.cpu.numbers import number
from ...ops.cpu.rows import add, clear
from ...runtime.pieces.piece import Matrix, Whole, piece
from ...runtime.pieces.tiles import dot
from ...runtime.pieces.views import row, rows
from .memory import copy
from .workspace import Work


@piece
def close(w: Work, Y: Matrix, W: Matrix, A: Matrix):
    """W = Y after the tile; at the end of a mini-batch W = A + f (Y - A), and A = W."""
    copy(Y, W)
    if w.CLOSES:
        if w.gain:
            f = w.gains[w.place]
            for i in range(len(W)):
                to, a = row(W, i), row(A, i)
                for j in range(len(to)):
                    to[j] = a[j] + f * (to[j] - a[j])
        copy(W, A)


@piece
def close_back(w: Work, Y: Matrix, A: Matrix, dW: Matrix, dA: Matrix):
    """Back through the end of a mini-batch; adds the gradient of f."""
    add(dA, dW)
    clear(dA)
    if w.gain:
        total, f = 0.0, w.gains[w.place]
        for i in range(len(dW)):
            y, a, d, da = row(Y, i), row(A, i), row(dW, i), row(dA, i)
            total += dot(d, y, len(d)) - dot(d, a, len(d))
            for j in range(len(d)):
                da[j] = (1 - f) * d[j]
                d[j] *= f
        w.dgains[w.place] += number(dW, total)


@piece
def store_rows(w: Work, W: Matrix, S: Matrix, A: Matrix, first: Whole, to_W: Matrix, to_S: Matrix, to_A: Matrix):
    """W, S and A as rows from `first` on."""
    n = len(W)
    copy(W, rows(to_W, first, n))
    copy(A, rows(to_A, first, n))
    if w.momentum:
        copy(S, rows(to_S, first, n))


@piece
def restore_rows(w: Work, first: Whole, of_W: Matrix, of_S: Matrix, of_A: Matrix, W: Matrix, S: Matrix, A: Matrix):
    """The inverse."""
    n = len(W)
    copy(rows(of_W, first, n), W)
    copy(rows(of_A, first, n), A)
    if w.momentum:
        copy(rows(of_S, first, n), S)
