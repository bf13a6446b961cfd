"""Feature maps of rows, each with its transpose; ops/map_steps.py describes their tables."""

from __future__ import annotations

from ...runtime.pieces.piece import Matrix, Number, Vector, Whole, Wholes, piece
from ...runtime.pieces.registers import fma, registers, store, total
from ...runtime.pieces.tiles import dot
from ...runtime.pieces.vectors import BYTES
from ...runtime.pieces.views import row
from .numbers import exp, number, sine_cosine

zeros, read = registers(1)


@piece
def monomials(X: Matrix, n: Whole, segments: Wholes, weights: Vector, F: Matrix):
    """F_j = weights_j F_s x_l for the features j = t, t + 1, ... and channels l, l + 1, ... of segments (s, l, t).

    X has n channels and a vector of zeros behind them; whole vectors are computed, and surplus columns overwritten.
    """
    lane = BYTES // F.itemsize
    for i in range(len(X)):
        F[i, 0] = weights[0]
    for s in range(len(segments)):
        parent, channel, to = segments[s, 0], segments[s, 1], segments[s, 2]
        for j in range(0, n - channel, lane):
            by = read(weights, to + j)
            for i in range(len(X)):
                f, x = row(F, i), row(X, i)
                store(f[parent] * (by * read(x, channel + j)), f, to + j)


@piece
def monomials_vjp(X: Matrix, n: Whole, segments: Wholes, weights: Vector, F: Matrix, dF: Matrix, dX: Matrix):
    """dX += the transpose, segments from the last to the first; dF gains the gradients of its children."""
    lane = BYTES // F.itemsize
    for s in range(len(segments) - 1, -1, -1):
        parent, channel, to = segments[s, 0], segments[s, 1], segments[s, 2]
        for i in range(0, len(X), 2):  # two rows at a time, the last one twice: all is read, then written
            h, d, e = min(i + 1, len(X) - 1), zeros(X), zeros(X)
            x, df, dx, x_h, df_h, dx_h = row(X, i), row(dF, i), row(dX, i), row(X, h), row(dF, h), row(dX, h)
            for j in range(0, n - channel, lane):
                l, by = channel + j, read(weights, to + j)
                y, z = read(df, to + j) * by, read(df_h, to + j) * by
                d, e = fma(y, read(x, l), d), fma(z, read(x_h, l), e)
                y, z = fma(F[i, parent], y, read(dx, l)), fma(F[h, parent], z, read(dx_h, l))
                store(y, dx, l)
                store(z, dx_h, l)
            df[parent], df_h[parent] = df[parent] + total(d), df_h[parent] + total(e)


@piece
def exponentials(P: Matrix, X: Matrix, numbers: Vector):
    """P_ij <- e^{P_ij - square |x_i|^2 - less}, numbers = (square, less)."""
    for i in range(len(X)):
        x, p = row(X, i), row(P, i)
        h = numbers[0] * dot(x, x, len(x)) + numbers[1]
        for j in range(len(p)):
            p[j] = exp(p[j] - h)


@piece
def exponentials_vjp(D: Matrix, F: Matrix, numbers: Vector, total: Vector):
    """D <- F (.) D, total_i = -2 square sum_j D_ij"""
    for i in range(len(D)):
        d, f = row(D, i), row(F, i)
        total[i] = number(total, -2) * numbers[0] * dot(d, f, len(d))
        for j in range(len(d)):
            d[j] *= f[j]


@piece
def waves(A: Matrix, half: Whole, size: Number, F: Matrix):
    """F = size [sin A, cos A]"""
    for i in range(len(A)):
        a, f = row(A, i), row(F, i)
        for j in range(half):
            sine, cosine = sine_cosine(a[j])
            f[j] = size * sine
            f[half + j] = size * cosine


@piece
def waves_vjp(D: Matrix, F: Matrix, half: Whole, dA: Matrix):
    """dA = D_sin (.) F_cos - D_cos (.) F_sin"""
    for i in range(len(dA)):
        d, f, to = row(D, i), row(F, i), row(dA, i)
        for j in range(half):
            to[j] = d[j] * f[half + j] - d[half + j] * f[j]
