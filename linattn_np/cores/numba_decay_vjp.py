"""The transposes of numba_decay.py for one chunk, with the gradient of g as sums of what crosses it.

A product whose path leads from token j to token i crosses g_t for j < t <= i (early: t < i). Sums are of such products
only: nothing cancels, and a gate that nothing crosses has the gradient 0 exactly.
"""

from __future__ import annotations

import numpy as np

from ..pieces.numba_jit import apart, jit
from ..pieces.numba_lanes import add_both_row, add_row, pull_pair_row, pull_row
from ..pieces.numba_rows import add_times, dot, times
from ..pieces.numba_tiles import FULL, Mat, line, moved, product, row, size_of, turned
from .numba_decay import BLOCK, heads, reaches


@jit
def pull(one, dP, P, E, m, strict, factors, crossed):
    """From the cotangent dP of P = factors (.) raw (.) E: crossed += dP (.) P, dP <- factors (.) dP (.) E, j <= i only."""
    apart()
    size = size_of(one)
    for i in range(m):
        f = line(one, factors.at + size * i * factors.step, 1)[0]
        pull_row(one, dP.at + size * i * dP.row, P.at + size * i * P.row, E.at + size * i * E.row,
                 crossed.at + size * i * crossed.row, f, i + 1 - strict, m)  # fmt: skip


@jit
def crossings(one, crossed, readers, writers, total, sums, m, at, step, more):
    """dg_t = sum_{i >= t > j} crossed_ij + sum_{i >= t} readers_i + sum_{j < t} writers_j + total, to memory.

    sums: room for a row.
    """
    apart()
    below, before = line(one, sums.at, m), np.float64(line(one, total.at, 1)[0])
    for t in range(m):
        y = line(one, at + t * step, 1)
        y[0] = before + (y[0] if more else 0)
        before += row(one, writers, t, 1)[0]
        below[t] = 0
    after = np.float64(0)
    for t in range(m - 1, -1, -1):
        x, inside = row(one, crossed, t, t), one - one
        for j in range(t):
            below[j] += x[j]
            inside += below[j]
        after += row(one, readers, t, 1)[0]
        line(one, at + t * step, 1)[0] += after + inside


@jit
def overlap(one, S, dS, m, n, carry, out):
    """out = carry sum (S (.) dS)"""
    apart()
    total = np.float64(0)
    for i in range(m):
        total += dot(one - one, row(one, S, i, n), row(one, dS, i, n), n)
    line(one, out.at, 1)[0] = total * line(one, carry.at, 1)[0]


@jit
def channel_overlap(one, S, dS, m, n, carry, out):
    """out_d = carry_d sum_v S_dv dS_dv, a row."""
    apart()
    y, factors = line(one, out.at, m), line(one, carry.at, m)
    for d in range(m):
        y[d] = factors[d] * dot(one - one, row(one, S, d, n), row(one, dS, d, n), n)


@jit
def channel_crossings(one, W, crossed, readers, writers, total, m, K, at, step, more):
    """dg_t = crossed_t + sum_{i >= t} readers_i + sum_{j < t} writers_j + total, all rows of K, to memory."""
    apart()
    size = size_of(one)
    for t in range(m - 2, -1, -1):
        add_row(one, readers.at + size * t * readers.row, readers.at + size * (t + 1) * readers.row, K)
    for t in range(1, m):
        add_row(one, writers.at + size * t * writers.row, writers.at + size * (t - 1) * writers.row, K)
    everywhere = line(one, total.at, K)
    for t in range(m):
        x, y, out = row(one, crossed, t, K), row(one, readers, t, K), line(one, at + t * step, K)
        before = row(one, writers, t - 1, K) if t else everywhere
        for d in range(K):
            z = x[d] + y[d] + everywhere[d]
            if t:
                z += before[d]
            out[d] = z + (out[d] if more else 0)


@jit
def channel_pull(one, P, X, Y, W, early, m, K, dX, dY, crossed, scratch, ones):
    """From the cotangent P of the gram of X and Y: dX += rows(P, Y), dY += cols(P, X), crossed += what crosses g."""
    apart()
    for b in range(0, m, BLOCK):
        rows = min(BLOCK, m - b)
        for j in range(b, b + rows):
            _pull_column(one, P, X, Y, W, early, j, b + rows, K, dX, dY, crossed, scratch)
        if b:
            _pull_block(one, P, X, Y, W, early, b, rows, K, dX, dY, crossed, scratch, ones)


@jit
def _pull_column(one, P, X, Y, W, early, j, end, K, dX, dY, crossed, scratch):
    """Column j of a block on the diagonal; scratch: the faded way, a sum, and the products z_i."""
    size = size_of(one)
    step = size * scratch.row
    way, total, z = scratch.at, scratch.at + step, scratch.at + 2 * step
    p, q = row(one, scratch, 0, K), row(one, scratch, 1, K)
    for d in range(K):
        p[d], q[d] = one, 0
    for i in range(j + early, end):
        fade = i - early
        w = W.at + size * fade * W.row if fade > j else 0
        pull_pair_row(one, way, w, X.at + size * i * X.row, Y.at + size * j * Y.row, dX.at + size * i * dX.row,
                      dY.at + size * j * dY.row, z + (i - j) * step, row(one, P, i, j + 1)[j], K)  # fmt: skip
    for t in range(end - 1, j, -1):
        if early:
            add_row(one, crossed.at + size * t * crossed.row, total, K)
            add_row(one, total, z + (t - j) * step, K)
        else:
            add_both_row(one, total, z + (t - j) * step, crossed.at + size * t * crossed.row, K)


@jit
def _pull_block(one, P, X, Y, W, early, b, rows, K, dX, dY, crossed, scratch, ones):
    """Rows b.. against all columns before b, which meet at row b; scratch: heads, near, sum, reaches, far, products."""
    none, size = Mat(0, 0, 0), size_of(one)
    head, near = scratch, moved(one, scratch, BLOCK, 0)
    total = moved(one, scratch, 2 * BLOCK, 0)
    reach, far = moved(one, scratch, 2 * BLOCK + 1, 0), moved(one, scratch, 2 * BLOCK + 1 + b, 0)
    D = moved(one, scratch, 2 * BLOCK + 1 + 2 * b, 0)
    heads(one, W, early, b, rows, K, head)
    reaches(one, W, b, K, reach)
    times(one, moved(one, X, b, 0), head, rows, K, near)
    times(one, Y, reach, b, K, far)
    corner, step = moved(one, P, b, 0), size * scratch.row
    product(one, FULL, corner, far, rows, K, b, ones, none, ones, D)
    add_times(one, D, head, rows, K, moved(one, dX, b, 0))
    times(one, D, near, rows, K, D)
    _zero(row(one, total, 0, K), K)
    for i in range(rows - 1, -1, -1):
        line_t = crossed.at + size * (b + i) * crossed.row
        if early:
            add_row(one, line_t, total.at, K)
            add_row(one, total.at, D.at + i * step, K)
        else:
            add_both_row(one, total.at, D.at + i * step, line_t, K)
    product(one, FULL, turned(corner), near, b, K, rows, ones, none, ones, D)
    add_times(one, D, reach, b, K, dY)
    times(one, D, far, b, K, D)
    _zero(row(one, total, 0, K), K)
    for t in range(b):
        add_row(one, crossed.at + size * t * crossed.row, total.at, K)
        add_row(one, total.at, D.at + t * step, K)


@jit
def _zero(x, n):
    for d in range(n):
        x[d] = 0
