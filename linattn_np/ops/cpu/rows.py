"""Sums, products and lengths of the rows of small matrices."""

from __future__ import annotations

import numpy as np
from numba import types

from ...runtime.pieces.piece import Double, Kind, Matrix, Number, Truth, Vector, Whole, piece
from ...runtime.pieces.tiles import dot
from ...runtime.pieces.views import row
from ...runtime.values import range_factors
from .numbers import exp, number


@piece
def scaled(A: Matrix, factors: Vector, out: Matrix):
    """out = diag(factors) A, as much as both have, and zeros to the right of A; no factors: a copy."""
    n = min(A.shape[1], out.shape[1])
    for i in range(len(out)):
        a, to = row(A, i), row(out, i)
        f = factors[i] if len(factors) else number(out, 1)
        for j in range(n):
            to[j] = f * a[j]
        for j in range(n, len(to)):
            to[j] = 0


@piece
def scale_rows(A: Matrix, factors: Vector):
    """A <- diag(factors) A"""
    for i in range(len(A)):
        a, f = row(A, i), factors[i]
        for j in range(len(a)):
            a[j] *= f


@piece
def scale_columns(A: Matrix, factors: Vector, out: Matrix):
    """out = A diag(factors)"""
    for i in range(len(out)):
        a, to = row(A, i), row(out, i)
        for j in range(len(to)):
            to[j] = a[j] * factors[j]


@piece
def hadamard(A: Matrix, B: Matrix, out: Matrix):
    """out = A (.) B"""
    for i in range(len(out)):
        a, b, to = row(A, i), row(B, i), row(out, i)
        for j in range(len(to)):
            to[j] = a[j] * b[j]


@piece
def hadamard_to(A: Matrix, B: Matrix):
    """B <- A (.) B"""
    for i in range(len(B)):
        a, b = row(A, i), row(B, i)
        for j in range(len(b)):
            b[j] *= a[j]


@piece
def add_hadamard(A: Matrix, B: Matrix, out: Matrix):
    """out += A (.) B, in the rows of A."""
    for i in range(len(A)):
        a, b, to = row(A, i), row(B, i), row(out, i)
        for j in range(len(to)):
            to[j] += a[j] * b[j]


@piece
def add(A: Matrix, out: Matrix):
    """out += A"""
    for i in range(len(out)):
        a, to = row(A, i), row(out, i)
        for j in range(len(to)):
            to[j] += a[j]


@piece
def suffix_sums(A: Matrix):
    """A_i <- A_i + A_{i + 1} + ... + the last row"""
    for i in range(len(A) - 2, -1, -1):
        a, after = row(A, i), row(A, i + 1)
        for j in range(len(a)):
            a[j] += after[j]


@piece
def exp_rows(A: Matrix):
    """A <- e^A"""
    for i in range(len(A)):
        a = row(A, i)
        for j in range(len(a)):
            a[j] = exp(a[j])


@piece
def clear(A: Matrix):
    """A = 0"""
    for i in range(len(A)):
        a = row(A, i)
        for j in range(len(a)):
            a[j] = 0


@piece
def fill(x: Vector, value: Number):
    """x = value"""
    for i in range(len(x)):
        x[i] = value


@piece
def times(sign: Number, x: Vector, y: Vector, out: Vector):
    """out = sign x (.) y; no y: sign x"""
    for i in range(len(out)):
        out[i] = sign * x[i] * y[i] if len(y) else sign * x[i]


@piece
def add_dots(A: Matrix, B: Matrix, below: Truth, sign: Number, out: Vector):
    """out_i += sign A_i . B_i, over columns j < i only if `below`."""
    for i in range(len(A)):
        out[i] += sign * dot(row(A, i), row(B, i), i if below else A.shape[1])


@piece
def overlap(A: Matrix, B: Matrix) -> Double:
    """sum A (.) B"""
    total = 0.0
    for i in range(len(A)):
        total += dot(row(A, i), row(B, i), A.shape[1])
    return total


@piece
def add_outer(x: Vector, y: Vector, out: Matrix):
    """out += x^T y"""
    for i in range(len(out)):
        f, to = x[i], row(out, i)
        for j in range(len(to)):
            to[j] += f * y[j]


@piece
def add_weighted_rows(weights: Vector, A: Matrix, scale: Number, out: Vector):
    """out += scale sum_i weights_i A_i; no weights: 1"""
    for i in range(len(A)):
        a = row(A, i)
        f = scale * weights[i] if len(weights) else scale
        for j in range(len(out)):
            out[j] += f * a[j]


# lengths of rows whose squares may be out of range (runtime/values.py: range_factors): n = |x|, or sqrt(|x|^2 + root^2)

LIMIT32, UP32, DOWN32 = range_factors(32)
LIMIT64, UP64, DOWN64 = range_factors(64)
SMALL32, LARGE32, SMALL64, LARGE64 = LIMIT32**-2.0, LIMIT32**2.0, LIMIT64**-2.0, LIMIT64**2.0  # squares in range
Length = Kind(lambda f: types.UniTuple(f, 2))


@piece
def length_of(x: Vector, n: Whole, root: Number) -> Length:
    """(factor times the length of n numbers, factor), factor a power of 2 that keeps squares in range; (1, 1) of 0."""
    single = x.itemsize == 4
    small, large = (SMALL32, LARGE32) if single else (SMALL64, LARGE64)
    up, down = (UP32, DOWN32) if single else (UP64, DOWN64)
    factor, square = number(x, 1), dot(x, x, n) + root * root
    if square < small or square > large:
        f = number(x, up if square < small else down)
        square = (f * root) * (f * root)
        for j in range(n):
            square += (f * x[j]) * (f * x[j])
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
def normalise_rows(X: Matrix, root: Number):
    """x_i <- x_i / n_i; 0 of 0"""
    n = X.shape[1]
    for i in range(len(X)):
        x = row(X, i)
        length, factor = length_of(x, n, root)
        for j in range(n):
            x[j] = factor * x[j] / length


@piece
def unit_rows_vjp(X: Matrix, dY: Matrix, out: Matrix, root: Number):
    """out_i = (dy_i - x_i (x_i . dy_i) / n_i^2) / n_i"""
    n = X.shape[1]
    for i in range(len(X)):
        x, d, to = row(X, i), row(dY, i), row(out, i)
        length, factor = length_of(x, n, root)
        for j in range(n):
            to[j] = factor * x[j]
        share = -(dot(to, d, n) / length / length)
        for j in range(n):
            to[j] = (share * to[j] + d[j]) / length * factor


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
