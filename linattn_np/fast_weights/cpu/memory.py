"""Copies of matrices and of columns of coefficients."""

from __future__ import annotations

from ...runtime.pieces.piece import Matrix, Whole, piece
from ...runtime.pieces.views import row, rows
from .workspace import Work


@piece
def copy(A: Matrix, out: Matrix):
    """out = A"""
    for i in range(len(out)):
        a, to = row(A, i), row(out, i)
        for j in range(len(to)):
            to[j] = a[j]


@piece
def column_of(w: Work, at: Whole, n: Whole):
    """The coefficients of base n, from row `at` on."""
    c, to = rows(w.c, at, w.n), w.column
    for i in range(len(to)):
        to[i] = c[i, n]
