"""The decay of a chunk: tables of e^s, s(j, i) = g_{j+1} + ... + g_i, and grams that are weighed with them.

Scalar decay (none: g = 0) has E_ij = e^{s(j, i)} by sums of its own terms in float64. Vector decay has products of its
own factors e^{g}, each <= 1, in sub-blocks of 16 tokens whose pairs meet at the first row of the later block. What
reads S_{t-1} has s(j, i - 1): the table one row earlier, where no j is left for the first row.
"""

from __future__ import annotations

import numpy as np

from ...ops.cpu.numbers import exp, faded, number
from ...ops.cpu.products import FULL, OUT_LOWER, product, transpose
from ...ops.cpu.rows import exp_rows, fill, hadamard_to, scaled
from ...ops.cpu.storage import load, load_column
from ...runtime.pieces.piece import Matrix, Truth, Vector, Whole, Wide, piece
from ...runtime.pieces.row_tiles import dot, dot_wide, faded_dot
from ...runtime.pieces.views import as_row, columns, row, rows
from ..policy import DECAY_BLOCK as BLOCK
from ..policy import GATE_FLOOR
from .workspace import EARLY, STRICT, Work


@piece
def decays(w: Work):
    """The tables of the chunk; without a decay of the token `once` has made them."""
    place = (w.BATCH, w.HEAD, w.t)
    if w.scalar:
        load_column(w.in_g, place, w.factor)
        pair_table(w.factor, w.sums, w.E, w.start, w.end)
        fill(w.carry, w.start[w.c])
    elif w.vector:
        load(w.in_g, place, (0, w.K), w.W)
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
    """out_ij = factors_i (what x_i reads of y_j), 0 above the diagonal (STRICT: and on it)."""
    plain_gram(w, x, y, yT, reads, out)
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
    """out_ij = x_i . y_j - P_ij for j < i: what the rounded product P leaves out, from float64 sums; 0 if beta_i <= 1.

    A row decides for itself: a choice for all rows would let the beta of a later token change an earlier output.
    """
    for i in range(len(out)):
        x, p, to = row(X, i), row(P, i), row(out, i)
        for j in range(len(to)):
            to[j] = 0
        if beta[i] > 1:
            for j in range(i):
                to[j] = number(out, dot_wide(x, row(Y, j), X.shape[1]) - p[j])


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
    """The gram of a vector decay: blocks on the diagonal pair by pair, those before them as products."""
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
                    out[i, j] = faded_dot(p, row(W, i - early), row(X, i))
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
    b = len(out)
    fill(row(out, b - 1), 1.0)
    for j in range(b - 2, -1, -1):
        to, after, factors = row(out, j), row(out, j + 1), row(W, j + 1)
        for d in range(len(to)):
            to[d] = faded(after[d], factors[d])

