"""Backward: a task is one sequence and the heads that share keys or queries; for each block of keys all its queries.

    p_ij = e^{z_ij - log_i},   dz_ij = p_ij (dout_i . v_j - delta_i),   delta_i = dout_i . out_i - dlse_i
    dV_j += sum_i p_ij dout_i,   dK_j += sum_i dz_ij scale q_i,   dq_i += scale sum_j dz_ij k_j
    dsink -= sum_i e^{sink - log_i} delta_i: a key without a value

dg_s = sum_{j < s <= i} dz_ij: pairs of a diagonal block, the rows from s on of its block with earlier blocks, the
columns before s of its block with later blocks, and the pairs of blocks on both sides.
"""

from __future__ import annotations

from ...ops.cpu.numbers import exp, number
from ...ops.cpu.products import FULL, LEFT_LOWER, LEFT_UPPER, product, transpose
from ...ops.cpu.rows import clear
from ...ops.cpu.storage import clear_sums, load, load_column, save, save_column
from ...runtime.pieces.piece import Whole, piece
from ...runtime.pieces.tiles import dot, sum_of
from ...runtime.pieces.views import row, tokens_of, transposed
from .tile import begin_task, bias, load_keys, load_queries, logits, pair_sums
from .workspace import Work


@piece
def begin_gates(w: Work):
    """Sums of the gates are 0."""
    if w.gated:
        for t in range(w.T):
            w.readers[t] = 0
            w.dg[t] = 0
        for n in range(w.blocks):
            w.crossed[n] = 0


@piece
def begin_head(w: Work):
    """delta of all queries; sums of the gates are 0."""
    for t in range(w.T):
        w.delta[t] = 0
    w.i, w.between = 0, 0.0
    while w.normalize and w.i < w.TO:
        w.c = min(w.C, w.TO - w.i)
        place = (w.BATCH, w.h, w.FIRST + w.i)
        out, dout = tokens_of(w.out, w.scale, place, w.c, (0, w.V)), w.dout
        load(w.in_dout, place, (0, w.V), w.dout)
        for i in range(w.c):
            w.delta[w.i + i] = dot(row(out, i), row(dout, i), w.V)
        if w.lse:
            load_column(w.in_dlse, place, w.log)
            for i in range(w.c):
                w.delta[w.i + i] -= w.log[i]
        if w.sinks:
            add_sink(w)
        w.i += w.C
    if w.sinks and w.normalize:
        w.c = 1
        w.log[0] = number(w.log, w.between)
        save_column(w.log, w.out_dsinks, (w.ROW, w.h, 0))
    begin_gates(w)


@piece
def add_sink(w: Work):
    """The terms of a block of queries in dsink."""
    total = w.between
    load_column(w.in_sinks, (0, w.h, 0), w.fade)
    load_column(w.logs, (w.BATCH, w.h, w.FIRST + w.i), w.log)
    for i in range(w.c):
        total -= exp(w.fade[i] - w.log[i]) * w.delta[w.i + i]
    w.between = total


@piece
def weigh(w: Work):
    """Z <- p, dZ <- p (dP - delta), zeros where a key is not read."""
    for i in range(w.c):
        bias(w, i)
        p, d, log, delta = row(w.Z, i), row(w.dZ, i), w.log[i], number(w.Z, 0)
        if w.normalize:
            delta = w.delta[w.i + i]
        n = min(max(w.i + i + 1 - w.strict - w.j, 0), w.n) if w.causal and not w.is_past else w.n
        for j in range(n):
            x = exp(p[j] - log)
            p[j] = x
            d[j] = x * (d[j] - delta)
        for j in range(n, w.n):
            p[j] = 0
            d[j] = 0


@piece
def tile(w: Work):
    """A tile: the terms of a block of queries in dq, and in dK and dV of the loaded keys."""
    place = (w.BATCH, w.h, w.FIRST + w.i)
    load_queries(w)
    load(w.in_dout, place, (0, w.V), w.dout)
    load_column(w.logs, place, w.log)
    if w.gated and w.is_diagonal:
        pair_sums(w)
    logits(w)
    product(FULL, w.dout, w.vT, w.dZ)
    weigh(w)
    if w.biased and not w.is_past:
        save(w.dZ, w.out_dbias, place, (w.j, w.n))
    upper = LEFT_UPPER if w.is_diagonal else FULL
    product(upper, transposed(w.Z), w.dout, w.dV, added=w.dV)
    product(upper, transposed(w.dZ), w.q, w.dK, added=w.dK)
    dq = tokens_of(w.out_dq, w.scale, place, w.c, (0, w.K))
    for i in range(w.c):
        w.scales[i] = w.scale
    product(LEFT_LOWER if w.is_diagonal else FULL, w.dZ, w.k, dq, w.scales, dq)
    if w.gated:
        gates(w)


@piece
def gates(w: Work):
    """What the pairs of a tile add to dg."""
    if w.is_diagonal:
        for j in range(w.n):
            w.below[j] = 0
        for s in range(w.c - 1, -1, -1):
            d = row(w.dZ, s)
            for j in range(s):
                w.below[j] += d[j]
            w.dg[w.i + s] += sum_of(w.below, s)
        return
    total = 0.0
    for i in range(w.c):
        d = row(w.dZ, i)
        x = sum_of(d, w.n)
        total += x
        w.readers[w.i + i] += x
        for j in range(w.n):
            w.columns[j] += d[j]
    w.totals[w.i // w.C] = number(w.Z, total)


@piece
def cross(w: Work):
    """The pairs of a block of queries with these keys cross the blocks between."""
    total = 0.0
    for n in range(w.blocks - 1, -1 if w.is_past else w.j // w.N, -1):
        w.crossed[n] += number(w.Z, total)
        total += w.totals[n]


@piece
def begin_keys(w: Work):
    """n keys; their sums are 0."""
    load_keys(w)
    transpose(w.k, w.kT)
    transpose(w.v, w.vT)
    clear(w.dK)
    clear(w.dV)
    if w.gated:
        for j in range(w.n):
            w.columns[j] = 0
        for n in range(w.blocks):
            w.totals[n] = 0
    w.between = 0.0


@piece
def queries(w: Work):
    """dK and dV of n keys from the queries from i on that read them."""
    n = w.n
    while w.i < w.TO and (w.is_past or not w.window or w.i < w.j + n + w.window - 1):
        w.c = min(w.C, w.TO - w.i)
        w.is_diagonal = 1 if w.causal and not w.is_past and w.i == w.j else 0
        tile(w)
        if w.gated and not w.is_diagonal:
            w.between = w.between + w.passed
        w.i += w.C
    if w.gated:
        cross(w)


@piece
def keys(w: Work):
    """dK and dV of n keys from all queries that read them."""
    begin_keys(w)
    w.i = w.j if w.causal and not w.is_past else 0
    queries(w)


@piece
def end_head(w: Work):
    """dg of the rows from s on of its block, and of the pairs that cross it."""
    i = 0
    while i < w.T:
        total = 0.0 + w.crossed[i // w.C]
        for s in range(min(i + w.C, w.T) - 1, i - 1, -1):
            total += w.readers[s]
            w.dg[s] += number(w.dg, total)
        i += w.C
    w.i, w.c = 0, w.T
    save_gates(w)


@piece
def save_gates(w: Work):
    """dg of the sequence, block by block."""
    while w.i < w.T:
        w.c = min(w.C, w.T - w.i)
        for i in range(w.c):
            w.log[i] = w.dg[w.i + i]
        save_column(w.log, w.out_dg, (w.BATCH, w.h, w.FIRST + w.i))
        w.i += w.C


@piece
def save_keys(w: Work):
    """dK and dV of the block; the terms of the columns before s in dg, or of the cache in db."""
    if w.is_past:
        place = (w.ROW, w.h, w.j)
        save(w.dK, w.past_dk, place, (0, w.K))
        save(w.dV, w.past_dv, place, (0, w.V))
        if w.gated:
            save_column(w.columns, w.past_db, place)
        return
    place = (w.BATCH, w.h, w.FIRST + w.j)
    save(w.dK, w.out_dk, place, (0, w.K))
    save(w.dV, w.out_dv, place, (0, w.V))
    if w.gated:
        add_columns(w)


@piece
def add_columns(w: Work):
    """dg of the columns before s of its block."""
    total = 0.0
    for j in range(w.n):
        w.dg[w.j + j] += number(w.dg, total)
        total += w.columns[j]


@piece
def backward(w: Work, first: Whole, last: Whole):
    """Gradients of the tasks first..last."""
    for n in range(first, last):
        begin_task(w, n)
        for h in range(w.HEAD, w.HEAD + w.heads):
            w.h = h
            begin_head(w)
            clear_sums(w.out_dq, (w.BATCH, w.h, w.FIRST), w.TO, (0, w.K), w.scale)
            w.is_past = 1
            for j in range(0, w.L, w.N):
                w.j, w.n = j, min(w.N, w.L - j)
                keys(w)
                save_keys(w)
            w.is_past = 0
            for j in range(0, w.T, w.N):
                w.j, w.n = j, min(w.N, w.T - j)
                keys(w)
                save_keys(w)
            if w.gated:
                end_head(w)
