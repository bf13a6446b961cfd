"""Stick-breaking attention: a task is a block of time of one sequence and head; rows of tiles are keys.

    log s_ij = min(z_ij, 0) - t_ij,   log(1 + e^{z_ij}) = max(z_ij, 0) + t_ij,   t_ij = log(1 + e^{-|z_ij|})
    a_ij = e^{log s_ij - sum_{l > j} log(1 + e^{z_il})},   o_i = sum_j a_ij v_j

Keys come from the newest to the oldest, until nothing is left of the stick of any query of the block: the weights
behind are exactly 0, and are not computed. Backward keeps s, 1 - s and G = a (.) dP of a block of queries, and goes
through the same keys from the oldest on: dz_il = (1 - s_il) G_il - s_il sum_{j < l} G_ij; 1 - s_il is no difference.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...ops.cpu.numbers import both_widths, exp, number, series
from ...ops.cpu.products import FULL, product, transpose
from ...ops.cpu.rows import clear
from ...ops.cpu.storage import clear_sums, load, save
from ...runtime.pieces.piece import Truth, Whole, piece
from ...runtime.pieces.views import row, tokens_of, transposed
from .tile import begin_task, load_keys, load_queries
from .workspace import Work

NOTHING32, NOTHING64 = 88.0, 709.0  # e^-x is 0


def log1p_exp(x: Any) -> Any:
    """log(1 + e^x) for x <= 0: with y = e^x and s = y / (2 + y) it is 2 (s + s^3 / 3 + s^5 / 5 + ...), s <= 1/3."""
    return np.log1p(exp(x))


@both_widths(log1p_exp)
def _log1p_exp(F: Any) -> Any:
    two, odd = F(2), series(*(1 / n for n in range(3, 14 if F is np.float32 else 34, 2)))

    def of(x: Any) -> Any:
        y = exp(x)
        s = y / (two + y)
        z = s * s
        return two * (s + s * z * odd(z))

    return of


@piece
def begin_rows(w: Work):
    """The queries of a block; nothing is taken yet."""
    load_queries(w)
    transpose(w.q, w.qT)
    clear(w.O)
    for i in range(w.c):
        w.m[i] = 0


@piece
def spent(w: Work) -> Truth:
    """Whether no query of the block has anything left; a NaN goes on."""
    nothing, count = number(w.m, NOTHING32 if w.m.itemsize == 4 else NOTHING64), 0
    for i in range(w.c):
        count += 1 if w.m[i] > nothing else 0
    return count == w.c


@piece
def logits(w: Work):
    """A = z of a tile, -inf where a key is not read."""
    product(FULL, w.k, w.qT, w.A)
    low, reach = number(w.A, -np.inf), number(w.A, w.reach)
    for j in range(w.n):
        z, hidden = row(w.A, j), 0
        if not w.is_past:
            hidden = min(max(w.j + j + w.strict - w.i, 0), w.c)
        elif not w.age[j] < reach:
            hidden = w.c
        for i in range(hidden):
            z[i] = low


@piece
def shares(w: Work):
    """A = z <- a, and m with the logs of the shares of the tile's keys."""
    left, m = w.run, w.m
    for i in range(w.c):
        left[i] = 0
    zero = number(w.A, 0)
    for j in range(w.n - 1, -1, -1):
        a = row(w.A, j)
        for i in range(w.c):
            z = a[i]
            size = z if z > zero else -z
            t = log1p_exp(-size)
            a[i] = exp((z if z < zero else zero) - t - left[i] - m[i])
            left[i] += (z if z > zero else zero) + t
    for i in range(w.c):
        m[i] += left[i]


@piece
def forward(w: Work, first: Whole, last: Whole):
    """Outputs of the tasks first..last."""
    for n in range(first, last):
        begin_task(w, n)
        w.h, w.i = w.HEAD, w.FROM
        while w.i < w.TO:
            w.c = min(w.C, w.TO - w.i)
            begin_rows(w)
            stop = min(w.i + w.c, w.T)
            w.is_past, w.j = 0, (stop - 1) // w.N * w.N
            while w.j >= 0 and not spent(w):
                w.n = min(w.N, stop - w.j)
                add_keys(w)
                w.j -= w.N
            w.is_past, w.j = 1, (w.L - 1) // w.N * w.N
            while w.j >= 0 and not spent(w):
                w.n = min(w.N, w.L - w.j)
                add_keys(w)
                w.j -= w.N
            save(w.O, w.out, (w.BATCH, w.h, w.FIRST + w.i), (0, w.V))
            w.i += w.C


@piece
def add_keys(w: Work):
    """O with n more keys."""
    load_keys(w)
    logits(w)
    shares(w)
    product(FULL, transposed(w.A), w.v, w.O, added=w.O)


@piece
def keep_keys(w: Work):
    """A tile of backward: s, 1 - s, G, and its terms of dv."""
    load_keys(w)
    w.tile = w.j // w.N + (w.blocks if w.is_past else 0)
    logits(w)
    for j in range(w.n):
        z, s, complement = row(w.A, j), row(w.S, j), row(w.complement, j)
        for i in range(w.c):
            x = z[i]
            y = exp(-x if x > 0 else x)
            more = 1 / (1 + y)
            s[i] = more if x > 0 else y * more
            complement[i] = y * more if x > 0 else more
    shares(w)
    product(FULL, w.v, w.doutT, w.dA)
    for j in range(w.n):
        a, d, g = row(w.A, j), row(w.dA, j), row(w.G, j)
        for i in range(w.c):
            g[i] = a[i] * d[i]
    place = (w.ROW, w.h, w.j) if w.is_past else (w.BATCH, w.h, w.FIRST + w.j)
    if w.is_past:
        dv = tokens_of(w.past_dv, w.scale, place, w.n, (0, w.V))
        product(FULL, w.A, w.dout, dv, added=dv)
    else:
        dv = tokens_of(w.out_dv, w.scale, place, w.n, (0, w.V))
        product(FULL, w.A, w.dout, dv, added=dv)


@piece
def keys_vjp(w: Work):
    """The same tile from the oldest key on: dz, and its terms of dq and dk; run holds G of all older keys."""
    load_keys(w)
    w.tile = w.j // w.N + (w.blocks if w.is_past else 0)
    run = w.run
    for j in range(w.n):
        s, complement, g, d = row(w.S, j), row(w.complement, j), row(w.G, j), row(w.dA, j)
        for i in range(w.c):
            d[i] = complement[i] * g[i] - s[i] * run[i]
            run[i] += g[i]
    dq = tokens_of(w.out_dq, w.scale, (w.BATCH, w.h, w.FIRST + w.i), w.c, (0, w.K))
    product(FULL, transposed(w.dA), w.k, dq, w.scales, dq)
    if w.is_past:
        dk = tokens_of(w.past_dk, w.scale, (w.ROW, w.h, w.j), w.n, (0, w.K))
        product(FULL, w.dA, w.q, dk, added=dk)
    else:
        dk = tokens_of(w.out_dk, w.scale, (w.BATCH, w.h, w.FIRST + w.j), w.n, (0, w.K))
        product(FULL, w.dA, w.q, dk, added=dk)


@piece
def block_vjp(w: Work):
    """What a block of queries adds to the gradients: its keys to where nothing is left, and back."""
    begin_rows(w)
    load(w.in_dout, (w.BATCH, w.h, w.FIRST + w.i), (0, w.V), w.dout)
    transpose(w.dout, w.doutT)
    for i in range(w.c):
        w.scales[i] = w.scale
    stop = min(w.i + w.c, w.T)
    w.is_past, w.j = 0, (stop - 1) // w.N * w.N
    while w.j >= 0 and not spent(w):
        w.n = min(w.N, stop - w.j)
        keep_keys(w)
        w.j -= w.N
    own, w.is_past, w.j = w.j + w.N, 1, (w.L - 1) // w.N * w.N
    while w.j >= 0 and not spent(w):
        w.n = min(w.N, w.L - w.j)
        keep_keys(w)
        w.j -= w.N
    for i in range(w.c):
        w.run[i] = 0
    for j in range(w.j + w.N, w.L, w.N):
        w.j, w.n = j, min(w.N, w.L - j)
        keys_vjp(w)
    w.is_past = 0
    for j in range(own, stop, w.N):
        w.j, w.n = j, min(w.N, stop - j)
        keys_vjp(w)


@piece
def backward(w: Work, first: Whole, last: Whole):
    """Gradients of the tasks first..last."""
    for n in range(first, last):
        begin_task(w, n)
        for h in range(w.HEAD, w.HEAD + w.heads):
            w.h, place = h, (w.BATCH, h, w.FIRST)
            clear_sums(w.out_dq, place, w.TO, (0, w.K), w.scale)
            clear_sums(w.out_dk, place, w.T, (0, w.K), w.scale)
            clear_sums(w.out_dv, place, w.T, (0, w.V), w.scale)
            for i in range(0, w.TO, w.C):
                w.i, w.c = i, min(w.C, w.TO - i)
                block_vjp(w)
