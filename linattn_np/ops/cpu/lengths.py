"""Lengths of rows whose squares may be out of range (runtime/values.py: range_factors), and rows divided by them.

A length is n = |x|, or with root > 0 sqrt(|x|^2 + root^2).
"""

from __future__ import annotations

import numpy as np
from numba import types

from ...runtime.pieces.piece import Kind, Matrix, Number, Vector, Whole, piece
from ...runtime.pieces.row_tiles import dot, scaled_dot
from ...runtime.pieces.views import row
from ...runtime.values import range_factors
from .numbers import number

LIMIT32, UP32, DOWN32 = range_factors(32)
LIMIT64, UP64, DOWN64 = range_factors(64)
Length = Kind(lambda f: types.UniTuple(f, 2))


@piece
def length_of(x: Vector, n: Whole, root: Number) -> Length:
    """(factor times the length of n numbers, factor), factor a power of 2 that keeps squares in range; (1, 1) of 0."""
    single = x.itemsize == 4
    limit, up, down = (LIMIT32, UP32, DOWN32) if single else (LIMIT64, UP64, DOWN64)
    factor, square = number(x, 1), dot(x, x, n) + root * root
    if square < limit**-2.0 or square > limit**2.0:
        f = number(x, up if square < limit**-2.0 else down)
        square = scaled_dot(x, x, f, f, n) + (f * root) * (f * root)
        factor = number(x, 1) if square == 0 else f
    length = number(x, 1) if square == 0 else np.sqrt(square)
    return length, factor


@piece
def unit_rows(X: Matrix, out: Matrix, root: Number):
    """out_i = x_i / n_i; 0 of 0"""
    n = X.shape[1]
    for i in range(len(X)):
        x, to = row(X, i), row(out, i)
        length, factor = length_of(x, n, root)
        for j in range(n):
            to[j] = factor * x[j] / length


@piece
def unit_rows_vjp(X: Matrix, dY: Matrix, out: Matrix, root: Number):
    """out_i = (dy_i - x_i (x_i . dy_i) / n_i^2) / n_i"""
    n = X.shape[1]
    for i in range(len(X)):
        x, d, to = row(X, i), row(dY, i), row(out, i)
        length, factor = length_of(x, n, root)
        share = -(scaled_dot(x, d, factor, number(x, 1), n) / length / length)
        for j in range(n):
            to[j] = (share * (factor * x[j]) + d[j]) / length * factor


@piece
def inverse_lengths(X: Matrix, n: Whole, out: Vector):
    """out_i = 1 / |x_i|, and 1 for 0."""
    for i in range(len(X)):
        length, factor = length_of(row(X, i), n, number(out, 0))
        out[i] = factor / length


@piece
def unit_vjp(X: Matrix, n: Whole, over: Vector, dX: Matrix):
    """dX_i <- over_i (dX_i - y_i <y_i, dX_i>), y_i = over_i x_i."""
    for i in range(len(X)):
        x, d, f = row(X, i), row(dX, i), over[i]
        along = -(f * (f * dot(x, d, n)))
        for j in range(n):
            d[j] = f * (along * x[j] + d[j])
