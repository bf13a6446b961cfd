"""Rows of layer norms: x = (z - mean z) / s, over = 1 / s, P(a) = (a - mean a - x mean(a x)) / s (../norm.py)."""

from __future__ import annotations

from math import sqrt

from ...ops.cpu.numbers import number
from ...runtime.pieces.piece import Matrix, Number, Vector, piece
from ...runtime.pieces.tiles import dot, sum_of
from ...runtime.pieces.views import row


@piece
def standard(Z: Matrix, eps: Number, X: Matrix, over: Vector):
    """X_i = (z_i - mean) over_i"""
    n = Z.shape[1]
    size = number(Z, n)
    for i in range(len(Z)):
        z, x = row(Z, i), row(X, i)
        mean = sum_of(z, n) / size
        for j in range(n):
            x[j] = z[j] - mean
        f = number(Z, 1 / sqrt(dot(x, x, n) / size + eps))
        for j in range(n):
            x[j] *= f
        over[i] = f


@piece
def project(a: Vector, x: Vector, f: Number, out: Vector):
    """out = P(a)"""
    n = len(a)
    size = number(a, n)
    mean, along = sum_of(a, n) / size, dot(a, x, n) / size
    for j in range(n):
        out[j] = (a[j] - mean - x[j] * along) * f
