"""Backward of PaTH: a task is one sequence and head; for each block of queries all keys, nearest first, and back.

A tile adds to dV and to the gradients of its keys. q and dq of each tile are stored, then from the furthest block on

    dR_J += q^(J)^T dq,   dq <- dq R_J^T + dq^(J)

On the diagonal Z = scale (q k^T - E X). dg is formed as in backward.py.
"""

from __future__ import annotations

from ...ops.cpu.numbers import number
from ...ops.cpu.products import FULL, LEFT_LOWER, LEFT_UPPER, product, transpose
from ...ops.cpu.rows import clear, scaled
from ...ops.cpu.storage import load, load_column, save
from ...runtime.pieces.piece import Number, Whole, piece
from ...runtime.pieces.views import rows, tokens_of, transposed
from .backward import begin_head, end_head, gates, weigh
from .tile import begin_task, leave_block, load_keys, load_map, load_queries, logits, pair_sums
from .workspace import Work


@piece
def tile(w: Work):
    """p and dZ of a tile; its terms of dV."""
    load_keys(w)
    transpose(w.k, w.kT)
    transpose(w.v, w.vT)
    if w.gated and w.is_diagonal:
        pair_sums(w)
    logits(w)
    product(FULL, w.dout, w.vT, w.dZ)
    weigh(w)


@piece
def diagonal(w: Work):
    """The tile of a block of queries with its own keys."""
    place = (w.BATCH, w.h, w.FIRST + w.i)
    tile(w)
    dv = tokens_of(w.out_dv, w.scale, place, w.c, (0, w.V))
    product(LEFT_UPPER, transposed(w.Z), w.dout, dv, added=dv)
    product(LEFT_UPPER, transposed(w.dZ), w.q, tokens_of(w.out_dk, w.scale, place, w.c, (0, w.K)))
    product(LEFT_LOWER, w.dZ, w.k, tokens_of(w.out_dq, w.scale, place, w.c, (0, w.K)), w.one)
    transpose(w.X, w.XT)
    product(LEFT_LOWER, w.dZ, w.XT, tokens_of(w.out_E, w.scale, place, w.c, (0, w.c)), w.one)
    product(LEFT_UPPER, transposed(w.E), w.dZ, tokens_of(w.out_X, w.scale, place, w.c, (0, w.c)), w.one)
    if w.gated:
        gates(w)


@piece
def keys_before(w: Work):
    """A tile of earlier keys: dV, the gradient of the keys at the end of their block, q and dq."""
    place, block = (w.BATCH, w.h, w.FIRST + w.j), w.j // w.N
    tile(w)
    dv = tokens_of(w.out_dv, w.scale, place, w.n, (0, w.V))
    product(FULL, transposed(w.Z), w.dout, dv, added=dv)
    dk = tokens_of(w.out_end, w.scale, place, w.n, (0, w.K))
    product(FULL, transposed(w.dZ), w.q, dk, added=dk)
    scaled(w.q, None, rows(w.mapped_q, w.j, w.c))
    product(FULL, w.dZ, w.k, rows(w.mapped_dq, w.j, w.c))
    if w.gated:
        edges(w)
        w.totals[block] = w.totals[w.i // w.C]
        for j in range(w.n):
            w.writers[w.j + j] += w.columns[j]
    w.between = w.between + total_decay(w)


@piece
def total_decay(w: Work) -> Number:
    """The log decay over a block of keys."""
    total = 0.0
    for j in range(w.n if w.gated else 0):
        total += w.g_n[j]
    return number(w.Z, total)


@piece
def edges(w: Work):
    """The sums of the rows of dZ, of its columns, and of all of it."""
    for j in range(w.n):
        w.columns[j] = 0
    gates(w)


@piece
def keys_of_cache(w: Work):
    """A tile of the cache."""
    place = (w.ROW, w.h, w.j)
    tile(w)
    dv = tokens_of(w.past_dv, w.scale, place, w.n, (0, w.V))
    product(FULL, transposed(w.Z), w.dout, dv, added=dv)
    dk = tokens_of(w.past_dk, w.scale, place, w.n, (0, w.K))
    product(FULL, transposed(w.dZ), w.q, dk, added=dk)
    product(FULL, w.dZ, w.k, w.dq, added=w.dq)
    if w.gated:
        edges(w)
        w.crossing = w.crossing + w.totals[w.i // w.C]
        db = tokens_of(w.past_db, w.scale, place, w.n, (0, 1))
        for j in range(w.n):
            db[j, 0] += w.columns[j]


@piece
def back(w: Work, lowest: Whole):
    """From the furthest block that was met on: dR, dq, and the pairs that cross a block."""
    w.j = lowest
    while w.j < w.i:
        place = (w.BATCH, w.h, w.MAPS + w.j // w.N * w.K_lanes)
        dR = tokens_of(w.out_R, w.scale, place, w.K, (0, w.K))
        product(FULL, transposed(rows(w.mapped_q, w.j, w.c)), w.dq, dR, added=dR)
        load_map(w, w.j)
        transpose(w.R, w.RT)
        scaled(w.dq, None, w.y)
        product(FULL, w.y, w.RT, w.dq, added=rows(w.mapped_dq, w.j, w.c))
        if w.gated:
            w.crossed[w.j // w.N] += w.crossing
            w.crossing = w.crossing + w.totals[w.j // w.N]
        w.j += w.N
    for i in range(w.c):
        w.scales[i] = w.scale
    save(w.dq, w.out_start, (w.BATCH, w.h, w.FIRST + w.i), (0, w.K), w.scales)


@piece
def queries(w: Work):
    """Everything that a block of queries reads."""
    place = (w.BATCH, w.h, w.FIRST + w.i)
    load_queries(w)
    load(w.in_dout, place, (0, w.V), w.dout)
    load_column(w.logs, place, w.log)
    lowest = max(w.i - w.window + 1, 0) // w.N * w.N if w.window else 0
    w.j, w.n, w.is_diagonal, w.between, w.crossing = w.i, w.c, 1, 0.0, 0.0
    diagonal(w)
    leave_block(w)
    w.is_diagonal, w.n = 0, w.N
    w.j -= w.N
    while w.j >= lowest:
        keys_before(w)
        leave_block(w)
        w.j -= w.N
    clear(w.dq)
    w.is_past = 1
    for j in range(0, w.L, w.N):
        w.j, w.n = j, min(w.N, w.L - j)
        keys_of_cache(w)
    w.is_past, w.n = 0, w.N
    back(w, lowest)


@piece
def sums_of_columns(w: Work):
    """dg of the columns before s of its block."""
    j = 0
    while j < w.T:
        total = 0.0
        for s in range(j, min(j + w.N, w.T)):
            w.dg[s] += number(w.dg, total)
            total += w.writers[s]
        j += w.N


@piece
def path_backward(w: Work, first: Whole, last: Whole):
    """Gradients of the tasks first..last."""
    for n in range(first, last):
        begin_task(w, n)
        w.h, w.is_past = w.HEAD, 0
        begin_head(w)
        if w.gated:
            for t in range(w.T):
                w.writers[t] = 0
        w.i = 0
        while w.i < w.TO:
            w.c = min(w.C, w.TO - w.i)
            queries(w)
            w.i += w.C
        if w.gated:
            sums_of_columns(w)
            end_head(w)
