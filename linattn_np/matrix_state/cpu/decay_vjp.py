"""The transposes of decay.py for one chunk, with the gradient of g as sums of what crosses it.

A product whose path leads from token j to token i crosses g_t for j < t <= i (EARLY: t < i). Sums are of such products
only: nothing cancels, and a gate that nothing crosses has the gradient 0 exactly.
"""

from __future__ import annotations

import numpy as np
from numba import types

from ...ops.cpu.numbers import number
from ...ops.cpu.products import FULL, LEFT_LOWER, LEFT_UPPER, product
from ...ops.cpu.rows import add, add_hadamard, hadamard, hadamard_to, suffix_sums
from ...ops.cpu.storage import Columns, save, save_column
from ...runtime.pieces.piece import Kind, Matrix, Number, Truth, Vector, Whole, piece
from ...runtime.pieces.row_tiles import gram_column_vjp, sum_of
from ...runtime.pieces.views import backwards, columns, row, rows, transposed
from ..policy import DECAY_BLOCK as BLOCK
from .decay import heads, reaches
from .workspace import EARLY, STRICT, Work

Matrices = Kind(lambda f: types.UniTuple(types.Array(f, 2, "A"), 3))  # gates, what crosses them, scratch


@piece
def gram_vjp(w: Work, reads: Whole, factors: Vector, P: Matrix, x: Matrix, y: Matrix, dx: Matrix, dy: Matrix):
    """dx += rows(dP, y), dy += columns(dP, x) and what the gates get, of P = factors (.) gram(x, y); dP is w.dP."""
    early = reads & EARLY
    table, crossed = w.E_before if early else w.E, w.crossed_before if early else w.crossed
    weigh_vjp(w.dP, P, table, reads & STRICT != 0, factors, crossed)
    if w.vector:
        block_gram_vjp((w.W, w.crossed_k, w.scratch), w.dP, x, y, early, dx, dy)
    else:
        product(LEFT_LOWER, w.dP, y, dx, added=dx)
        product(LEFT_UPPER, transposed(w.dP), x, dy, added=dy)


@piece
def weigh_vjp(dP: Matrix, P: Matrix, E: Matrix, strict: Truth, factors: Vector, crossed: Matrix):
    """From the cotangent dP of P = factors (.) raw (.) E: crossed += dP (.) P, dP <- factors (.) dP (.) E, j <= i."""
    m, zero = len(E), number(dP, 0)
    for i in range(m):
        f, stop = factors[i], i + 1 - strict
        d, p, e, to = row(dP, i), row(P, i), row(E, i), row(crossed, i)
        for j in range(m):
            x = d[j] if j < stop else zero
            to[j] += x * (p[j] if j < stop else zero)
            d[j] = f * (x * e[j]) if j < stop else zero


@piece
def gate_vjp(w: Work):
    """dg of the chunk, and dgv."""
    place = (w.BATCH, w.HEAD, w.t)
    if w.vector:
        channel_crossings(w.crossed_k, w.readers_k, w.writers_k, w.totals)
        save(w.crossed_k, w.out_dg, place, (0, w.K))
    elif w.decay:
        crossings(w.crossed, w.readers, w.writers, w.totals[0], w.column_sums, w.factor)
        save_column(w.factor, w.out_dg, place)
    if w.value_decay:
        channel_crossings(w.crossed_v, w.readers_v, w.writers_v, w.totals_v)
        save(w.crossed_v, w.out_dgv, place, (0, w.V))


@piece
def crossings(crossed: Matrix, readers: Vector, writers: Vector, total: Number, sums: Vector, dg: Vector):
    """dg_t = sum_{i >= t > j} crossed_ij + sum_{i >= t} readers_i + sum_{j < t} writers_j + total"""
    m, before, after = len(dg), np.float64(total), 0.0
    for t in range(m):
        sums[t] = 0
        dg[t] = number(dg, before)
        before += writers[t]
    for t in range(m - 1, -1, -1):
        x = row(crossed, t)
        for j in range(t):
            sums[j] += x[j]
        after += readers[t]
        dg[t] = number(dg, dg[t] + (after + sum_of(sums, t)))


# a decay of each channel


@piece(of="channels")
def channel_crossings(crossed: Matrix, readers: Matrix, writers: Matrix, total: Vector):
    """crossed_t += sum_{i >= t} readers_i + sum_{j < t} writers_j + total; total and readers are written over."""
    for t in range(len(crossed)):
        x, y = row(crossed, t), row(writers, t)
        for d in range(len(x)):
            x[d] += total[d]
            total[d] += y[d]
    suffix_sums(readers)
    add(readers, crossed)


@piece(of="channels")
def block_gram_vjp(own: Matrices, P: Matrix, X: Matrix, Y: Matrix, early: Whole, dX: Matrix, dY: Matrix):
    """From the cotangent P of the gram of X and Y: dX += rows, dY += columns, and what crosses the gates.

    own = (gates, what crosses them, scratch)
    """
    m = len(X)
    for b in range(0, m, BLOCK):
        end = min(b + BLOCK, m)
        for j in range(b, end):
            gram_column_vjp(P, (X, Y), (dX, dY), own, (j, end, early))
        if b:
            across_vjp(P, X, Y, early, (b, end), own, dX, dY)


@piece
def across_vjp(P: Matrix, X: Matrix, Y: Matrix, early: Whole, at: Columns, own: Matrices, dX: Matrix, dY: Matrix):
    """Rows b .. end against all columns before b, which meet at row b."""
    W, crossed, scratch = own
    b, end = at
    count = end - b
    head, near = rows(scratch, 0, count), rows(scratch, BLOCK, count)
    reach, far, D = rows(scratch, 2 * BLOCK, b), rows(scratch, 2 * BLOCK + b, b), rows(scratch, 2 * BLOCK + 2 * b, b)
    heads(W, early, b, head)
    reaches(W, reach)
    hadamard(rows(X, b, count), head, near)
    hadamard(rows(Y, 0, b), reach, far)
    corner, D_rows = columns(rows(P, b, count), 0, b), rows(scratch, 2 * BLOCK + 2 * b, count)
    product(FULL, corner, far, D_rows)
    add_hadamard(D_rows, head, rows(dX, b, count))
    hadamard_to(near, D_rows)
    suffix_sums(D_rows)
    add(rows(D_rows, early, count - early), rows(crossed, b, count - early))
    product(FULL, transposed(corner), near, D)
    add_hadamard(D, reach, rows(dY, 0, b))
    hadamard_to(far, D)
    suffix_sums(backwards(D, False))
    add(rows(D, 0, b - 1), rows(crossed, 1, b - 1))


