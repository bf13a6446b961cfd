"""The decay of a chunk: tables of e^s, s(j, i) = g_{j+1} + ... + g_i, and grams that are weighed with them.

Scalar decay (none: g = 0) has E_ij = e^{s(j, i)} by sums of its own terms in float64. Vector decay has products of its
own factors e^{g}, each <= 1, in sub-blocks of 16 tokens whose pairs meet at the first row of the later block. What
reads S_{t-1} has s(j, i - 1): the table one row earlier, where no j is left for the first row.

The transposes sum, for the gradient of g_t, the products that cross it. A product whose path leads from token j to
token i crosses g_t for j < t <= i (EARLY: t < i). No other terms are added and subtracted again, so nothing cancels,
and a gate that no product crosses has the gradient 0 exactly.
"""

from __future__ import annotations

import numpy as np
from numba import types

from ...ops.cpu.numbers import exp, faded, number
from ...ops.cpu.products import FULL, LEFT_LOWER, LEFT_UPPER, OUT_LOWER, product, transpose
from ...ops.cpu.rows import add, add_hadamard, exp_rows, fill, hadamard, hadamard_to, scaled, suffix_sums
from ...ops.cpu.storage import Columns, load, save_column, stream
from ...runtime.pieces.piece import Kind, Matrix, Number, Truth, Vector, Whole, Wide, piece
from ...runtime.pieces.registers import fma, registers, store, total, wide
from ...runtime.pieces.tiles import dot, sum_of
from ...runtime.pieces.vectors import BYTES
from ...runtime.pieces.views import as_row, backwards, columns, row, rows, transposed
from ..policy import DECAY_BLOCK as BLOCK
from ..policy import GATE_FLOOR
from .raw import load_scalar_decays, load_vector_decays, weigh_end, weigh_gram
from .workspace import EARLY, STRICT, Work

zeros, read = registers(1)
no_half, read_half = registers(1 / 2)
Matrices = Kind(lambda f: types.UniTuple(types.Array(f, 2, "A"), 3))  # gates, the products that cross them, scratch


@piece
def decays(w: Work):
    """The tables of the chunk. For calls without a decay `once` has computed them."""
    place = (w.BATCH, w.HEAD, w.t)
    if w.scalar:
        load_scalar_decays(w, w.factor)
        pair_table(w.factor, w.sums, w.E, w.start, w.end)
        fill(w.carry, w.start[w.c])
        if w.weighted:
            weigh_end(w)
    elif w.vector:
        load_vector_decays(w, w.W)
        tables_of(w.W, w.first, w.first_before, w.last, w.carry)
    if w.value_decay:
        load(w.in_gv, place, (0, w.V), w.W_v)
        tables_of(w.W_v, w.first_v, w.first_v_before, w.last_v, w.carry_v)


@piece
def pair_table(g: Vector, sums: Wide, E: Matrix, start: Vector, end: Vector):
    """E_ij = e^{s(j, i)} for j <= i, start_i = e^{s(start, i - 1)} (also for i = len(g)), end_j = e^{s(j, end)}."""
    m, total = len(g), 0.0
    for j in range(m):
        sums[j] = 0
    start[0] = 0
    for i in range(m):
        g_i, to = np.float64(g[i]), row(E, i)
        g_i = GATE_FLOOR if g_i < GATE_FLOOR else g_i
        total += g_i
        start[i + 1] = number(start, total)
        for j in range(min(i // 16 * 16 + 16, m)):
            s = sums[j] + (g_i if j < i else 0.0)
            sums[j] = s
            to[j] = exp(number(start, s))
    for i in range(m + 1):
        start[i] = exp(start[i])
    last = row(E, m - 1)
    for j in range(m):
        end[j] = last[j]


@piece
def weigh(P: Matrix, E: Matrix, strict: Truth, factors: Vector):
    """P_ij <- factors_i P_ij E_ij for j <= i (j < i if strict), 0 beyond."""
    m = len(P)
    for i in range(m):
        f, stop, to, e = factors[i], i + 1 - strict, row(P, i), row(E, i)
        for j in range(m):
            to[j] = f * (to[j] * e[j]) if j < stop else number(P, 0)


@piece
def gram(w: Work, x: Matrix, y: Matrix, yT: Matrix, reads: Whole, factors: Vector, out: Matrix):
    """out_ij = factors_i x_i . y_j times the decay from j to i, 0 above the diagonal (STRICT: and on it)."""
    plain_gram(w, x, y, yT, reads, out)
    if w.weighted:
        weigh_gram(w, out)
    else:
        weigh(out, w.E_before if reads & EARLY else w.E, reads & STRICT != 0, factors)


@piece
def plain_gram(w: Work, x: Matrix, y: Matrix, yT: Matrix, reads: Whole, out: Matrix):
    """A gram without the tables of a scalar decay."""
    if w.vector:
        block_gram(x, y, w.W, reads & EARLY, out, w.near, w.far, w.farT)
    else:
        product(OUT_LOWER, x, yT, out)


@piece
def rest(X: Matrix, Y: Matrix, P: Matrix, beta: Vector, out: Matrix):
    """out_ij = x_i . y_j - P_ij for j < i: the rounding error of P, from float64 sums; 0 if beta_i <= 1.

    A row decides for itself: a choice for all rows would let the beta of a later token change an earlier output.
    """
    for i in range(len(out)):
        x, p, to = row(X, i), row(P, i), row(out, i)
        for j in range(len(to)):
            to[j] = 0
        if beta[i] > 1:
            for j in range(i):
                y, sums = row(Y, j), wide(no_half(X))
                for d in range(0, X.shape[1], BYTES // 8):
                    sums = fma(wide(read_half(x, d)), wide(read_half(y, d)), sums)
                to[j] = number(out, total(sums) - p[j])


# a decay of each channel


@piece(of="channels")
def tables_of(W: Matrix, first: Matrix, before: Matrix, last: Matrix, carry: Vector):
    """W <- e^W, first_i = W_0 ... W_i with a row of ones before it, last_j = W_{j+1} ... W_{m-1}, carry: all of W."""
    exp_rows(W)
    fill(row(before, 0), 1.0)
    heads(W, 0, 0, first)
    reaches(W, last)
    scaled(rows(first, len(W) - 1, 1), None, as_row(carry))


@piece(of="channels")
def block_gram(X: Matrix, Y: Matrix, W: Matrix, early: Whole, out: Matrix, near: Matrix, far: Matrix, farT: Matrix):
    """The gram of a vector decay: diagonal blocks pair by pair, earlier blocks as matrix products."""
    m, n = X.shape
    for b in range(0, m, BLOCK):
        end = min(b + BLOCK, m)
        p = row(near, 0)
        for j in range(b, end):
            y = row(Y, j)
            for d in range(n):
                p[d] = y[d]
            out[j, j] = dot(row(X, j), y, n)
            for i in range(j + 1, end):
                if i - early > j:
                    w, x, sums = row(W, i - early), row(X, i), zeros(X)
                    for d in range(0, n, BYTES // X.itemsize):
                        faded_p = read(p, d) * read(w, d)
                        store(faded_p, p, d)
                        sums = fma(faded_p, read(x, d), sums)
                    out[i, j] = total(sums)
                else:
                    out[i, j] = dot(p, row(X, i), n)
        if b:
            reached, left = rows(near, 0, end - b), rows(far, 0, b)
            heads(W, early, b, reached)
            reaches(W, left)
            hadamard_to(rows(X, b, end - b), reached)
            hadamard_to(rows(Y, 0, b), left)
            across = columns(farT, 0, b)
            transpose(left, across)
            product(FULL, reached, across, columns(rows(out, b, end - b), 0, b))


@piece
def heads(W: Matrix, early: Whole, b: Whole, out: Matrix):
    """out_i = W_b ... W_{b + i}, to the token before if early."""
    if early:
        fill(row(out, 0), 1.0)
    else:
        scaled(rows(W, b, 1), None, rows(out, 0, 1))
    for i in range(1, len(out)):
        to, before, factors = row(out, i), row(out, i - 1), row(W, b + i - early)
        for d in range(len(to)):
            to[d] = faded(before[d], factors[d])


@piece
def reaches(W: Matrix, out: Matrix):
    """out_j = W_{j + 1} ... W_{b - 1} for the b rows of out."""
    heads(backwards(rows(W, 0, len(out)), False), 1, 0, backwards(out, False))


# transposes


@piece
def gram_vjp(w: Work, reads: Whole, factors: Vector, P: Matrix, x: Matrix, y: Matrix, dx: Matrix, dy: Matrix):
    """dx += rows(dP, y), dy += columns(dP, x) and the gates' terms, of P = factors (.) gram(x, y); dP is w.dP."""
    early = reads & EARLY
    table, crossed = w.E_before if early else w.E, w.crossed_before if early else w.crossed
    if not w.weighted:  # weigh_gram_vjp
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
        stream(w.crossed_k, w.out_dg, place, (0, w.K))
    elif w.decay:
        crossings(w.crossed, w.readers, w.writers, w.totals[0], w.factor)
        save_column(w.factor, w.out_dg, place)
    if w.value_decay:
        channel_crossings(w.crossed_v, w.readers_v, w.writers_v, w.totals_v)
        stream(w.crossed_v, w.out_dgv, place, (0, w.V))


@piece
def crossings(crossed: Matrix, readers: Vector, writers: Vector, total: Number, dg: Vector):
    """dg_t = sum_{i >= t > j} crossed_ij + sum_{i >= t} readers_i + sum_{j < t} writers_j + total; crossed is lost."""
    m, before, after = len(dg), np.float64(total), 0.0
    suffix_sums(crossed)
    for t in range(m):
        dg[t] = number(dg, before)
        before += writers[t]
    for t in range(m - 1, -1, -1):
        after += readers[t]
        dg[t] = number(dg, dg[t] + (after + sum_of(row(crossed, t), t)))


# transposes, a decay of each channel


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
    """From the cotangent P of the gram of X and Y: dX += rows, dY += columns, and the products that cross gates.

    own = (gates, the products that cross them, scratch)
    """
    m = len(X)
    for b in range(0, m, BLOCK):
        end = min(b + BLOCK, m)
        within_vjp(P, X, Y, early, (b, end), own, dX, dY)
        if b:
            across_vjp(P, X, Y, early, (b, end), own, dX, dY)


@piece
def within_vjp(P: Matrix, X: Matrix, Y: Matrix, early: Whole, at: Columns, own: Matrices, dX: Matrix, dY: Matrix):
    """Rows b .. end against columns b .. end, a vector of channels of each column at a time.

    way_i = W_{j+1} ... W_{i - early}:  dX_i += P_ij way_i Y_j,  dY_j += P_ij way_i X_i, and crossed_t += the sum of
    z_i = P_ij way_i X_i Y_j over i >= t (early: i > t).
    """
    (W, crossed, z), (b, end) = own, at
    for j in range(b, end):
        for d in range(0, X.shape[1], BYTES // X.itemsize):
            y, sums, way = read(row(Y, j), d), zeros(X), zeros(X) + 1.0
            for i in range(j + early, end):
                if i - early > j:
                    way = way * read(row(W, i - early), d)
                reached, dx = P[i, j] * way, row(dX, i)
                x = reached * read(row(X, i), d)
                store(fma(reached, y, read(dx, d)), dx, d)
                store(x * y, row(z, i - j), d)
                sums = sums + x
            store(read(row(dY, j), d) + sums, row(dY, j), d)
            after = zeros(X)
            for t in range(end - 1, j, -1):
                later, to = after, row(crossed, t)
                after = later + read(row(z, t - j), d)
                store(read(to, d) + (later if early else after), to, d)


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
