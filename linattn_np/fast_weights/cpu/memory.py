"""Copies of matrices."""

from __future__ import annotations

from ...runtime.pieces.piece import Matrix, piece
from ...runtime.pieces.views import row


@piece
def copy(A: Matrix, out: Matrix):
    """out = A"""
    for i in range(len(out)):
        a, to = row(A, i), row(out, i)
        for j in range(len(to)):
            to[j] = a[j]
