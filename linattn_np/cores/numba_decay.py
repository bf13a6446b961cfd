"""What cores/decay.py says, for one chunk in registers: tables of e^s, and grams.

Scalar decay (none: g = 0) has E_ij = e^{s(j, i)} by sums of its own terms in float64; "up to i - 1" is the table one
row earlier, where no j is left for the first row. Vector decay has products of its own
factors e^{g}, each <= 1, in sub-blocks of 16 tokens whose pairs meet at the first row of the later block.
"""

from __future__ import annotations

import numpy as np

from ..pieces.numba_jit import apart, jit
from ..pieces.numba_lanes import advance_row, exp_row, weigh_row
from ..pieces.numba_rows import TINY, dot, fade_and_dot
from ..pieces.numba_tiles import FULL, Mat, line, moved, product, row, size_of, transpose

NO_DECAY, SCALAR, VECTOR = 0, 1, 2
BLOCK = 16
GATE_FLOOR = -1.0e4  # a log decay below it means the same as -inf, and sums of it stay finite


@jit
def pair_table(one, g, sums, m, E, start, end, carry):
    """E_ij = e^{s(j, i)} for j <= i, start_i = e^{s(start, i - 1)}, end_j = e^{s(j, end)}, carry = start_m from g[:m].

    sums: address of s(j, i), a float64 for each j, of the row i that has been reached.
    """
    apart()
    kept = line(np.float64(0), sums, m)
    so_far, before = 0.0, line(one, start.at, m + 1)
    for i in range(m):
        g_i = GATE_FLOOR if g[i] < GATE_FLOOR else g[i]
        advance_row(one, sums, g_i, E.at + size_of(one) * i * E.row, i)
        row(one, E, i, i + 1)[i] = one
        kept[i] = 0
        before[i] = so_far
        so_far += g_i
    before[m] = so_far
    exp_row(one, start.at, m + 1)
    line(one, carry.at, 1)[0] = before[m]
    last, ends = row(one, E, m - 1, m), line(one, end.at, m)
    for j in range(m):
        ends[j] = last[j]


@jit
def channel_tables(one, m, K, W, start, end, carry):
    """W <- e^W (m, K); start_i = W_0 ... W_i with a row of ones before it, end_j = W_{j + 1} ... W_{m - 1}.

    carry (K, 1): the last of start.
    """
    apart()
    for i in range(m):
        exp_row(one, W.at + size_of(one) * i * W.row, K)
    p = row(one, start, -1, K)
    for d in range(K):
        p[d] = one
    _products(one, m, K, W, moved(one, start, -1, 0), start)
    p = row(one, end, m - 1, K)
    for d in range(K):
        p[d] = one
    for i in range(m - 2, -1, -1):
        _product_row(row(one, end, i + 1, K), row(one, W, i + 1, K), row(one, end, i, K), K)
    p, whole = row(one, start, m - 1, K), line(one, carry.at, K)
    for d in range(K):
        whole[d] = p[d]


@jit
def _products(one, m, K, W, before, out):
    """out_i = before_i (.) W_i"""
    for i in range(m):
        _product_row(row(one, before, i, K), row(one, W, i, K), row(one, out, i, K), K)


@jit
def _product_row(x, w, out, n):
    for d in range(n):
        y = x[d] * w[d]
        out[d] = 0 if y < TINY else y  # both factors are >= 0


@jit
def channel_gram(one, X, Y, W, early, m, K, out, near, far, farT, ones):
    """The gram of a vector decay: blocks on the diagonal pair by pair, those before them as products."""
    apart()
    for b in range(0, m, BLOCK):
        rows = min(BLOCK, m - b)
        for j in range(b, b + rows):
            _gram_column(one, X, Y, W, early, j, b + rows, K, out, near)
        if b:
            _gram_block(one, X, Y, W, early, b, rows, K, out, near, far, farT, ones)


@jit
def _gram_column(one, X, Y, W, early, j, end, K, out, near):
    """Column j of a diagonal block: y_j fades on its way down, one token at a time."""
    p, y = row(one, near, 0, K), row(one, Y, j, K)
    for d in range(K):
        p[d] = y[d]
    row(one, out, j, j + 1)[j] = dot(one - one, row(one, X, j, K), y, K)
    for i in range(j + 1, end):
        x, w = row(one, X, i, K), row(one, W, i, K)
        if early:
            row(one, out, i, j + 1)[j] = dot(one - one, x, p, K)
            _product_signed(p, w, K)
        else:
            row(one, out, i, j + 1)[j] = fade_and_dot(one - one, p, w, x, K)


@jit
def _product_signed(p, w, n):
    for d in range(n):
        p[d] *= w[d]


@jit
def _gram_block(one, X, Y, W, early, b, rows, K, out, near, far, farT, ones):
    """Rows b.. against all columns before b: (x_i e^{s(first row, i)}) . (y_j e^{s(j, first row)})."""
    heads(one, W, early, b, rows, K, near)
    reaches(one, W, b, K, far)
    for i in range(rows):
        _into(row(one, X, b + i, K), row(one, near, i, K), K)
    for j in range(b):
        _into(row(one, Y, j, K), row(one, far, j, K), K)
    transpose(one, far, b, K, farT)
    product(one, FULL, near, farT, rows, b, K, ones, Mat(0, 0, 0), ones, moved(one, out, b, 0))


@jit
def _into(x, f, n):
    for d in range(n):
        f[d] *= x[d]


@jit
def heads(one, W, early, b, rows, K, out):
    """out_i = W_b ... W_{b + i}, to the token before if early."""
    first = row(one, out, 0, K)
    w = row(one, W, b, K)
    for d in range(K):
        first[d] = one if early else w[d]
    _products(one, rows - 1, K, moved(one, W, b if early else b + 1, 0), out, moved(one, out, 1, 0))


@jit
def reaches(one, W, b, K, out):
    """out_j = W_{j + 1} ... W_{b - 1} for j < b."""
    last = row(one, out, b - 1, K)
    for d in range(K):
        last[d] = one
    for j in range(b - 2, -1, -1):
        _product_row(row(one, out, j + 1, K), row(one, W, j + 1, K), row(one, out, j, K), K)


@jit
def weigh(one, P, E, m, strict, factors):
    """P_ij <- factors_i P_ij E_ij for j <= i (j < i if strict), 0 beyond."""
    apart()
    for i in range(m):
        f = line(one, factors.at, m * factors.step + 1)[i * factors.step]
        weigh_row(one, P.at + size_of(one) * i * P.row, E.at + size_of(one) * i * E.row, f, i + 1 - strict, m)
