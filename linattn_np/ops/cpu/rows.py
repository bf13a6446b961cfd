"""Sums and products of the rows of small matrices."""

from __future__ import annotations

from ...runtime.pieces.piece import Double, Matrix, Number, Truth, Vector, piece
from ...runtime.pieces.row_tiles import dot
from ...runtime.pieces.views import row
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
def add_weighted_rows(weights: Vector, A: Matrix, scale: Number, out: Vector):
    """out += scale sum_i weights_i A_i; no weights: 1"""
    for i in range(len(A)):
        a = row(A, i)
        f = scale * weights[i] if len(weights) else scale
        for j in range(len(out)):
            out[j] += f * a[j]
