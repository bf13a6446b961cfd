"""The linear system of deltaformer: a task is one sequence, its blocks of time one after the other.

    (1 + diag(beta) P) u = v,   P_ij = e^{z_ij - log_i} for j < i,   z_ij = scale w_i . k_j and the decay

Keys before the block come tile by tile, as in forward.py with the values u; the block itself is a triangular system.
Backward goes from the last block to the first: once all later queries have added to du, the transposed system gives

    y = dv,   dbeta_i = -y_i . r_i with r = P u,   and dP_ij = d_i . u_j with d = -beta y

and the rest is backward.py with the queries w, the values u, outputs r and cotangents d.
"""

from __future__ import annotations

from ...ops.cpu.numbers import exp
from ...ops.cpu.products import LEFT_LOWER, product, solve, solve_transposed
from ...ops.cpu.rows import scale_rows
from ...ops.cpu.storage import load, load_column, save, save_column
from ...runtime.pieces.piece import Whole, piece
from ...runtime.pieces.tiles import dot
from ...runtime.pieces.views import row, tokens_of
from .backward import add_columns, begin_gates, begin_keys, end_head, keys, queries, save_keys, tile
from .forward import add_keys, begin_rows, last_factors, save_logs, weights
from .tile import begin_task, bias, load_queries, logits, pair_sums
from .workspace import Work


@piece
def earlier(w: Work):
    """m, l and O of a block of queries with all keys before it; a block of one token reads its own with weight 0."""
    begin_rows(w)
    stop = w.i + 1 if w.C == 1 else w.i
    w.is_past, w.is_diagonal, w.j = 0, 0, (stop - 1) // w.N * w.N
    while w.j >= 0:
        w.n = min(w.N, stop - w.j)
        add_keys(w)
        w.j -= w.N
    w.is_past = 1
    for j in range(0, w.L, w.N):
        w.j, w.n = j, min(w.N, w.L - j)
        add_keys(w)
    w.is_past = 0


@piece
def own(w: Work):
    """u and r of the block."""
    place = (w.BATCH, w.h, w.FIRST + w.i)
    w.j, w.n = w.i, w.c
    if w.C > 1:
        w.is_diagonal = 1
        weights(w)
        scale_rows(w.O, w.fade)
    last_factors(w)
    scale_rows(w.O, w.fade)
    load(w.in_rhs, place, (0, w.V), w.rhs)
    load_column(w.in_beta, place, w.beta)
    for i in range(w.c):
        x, o, beta = row(w.rhs, i), row(w.O, i), w.beta[i]
        for j in range(w.V):
            x[j] -= beta * o[j]
    if w.C > 1:
        scale_rows(w.Z, w.fade)
        system(w)
        solve(w.B, w.rhs)
        product(LEFT_LOWER, w.Z, w.rhs, w.O, added=w.O)
    save(w.rhs, w.in_v, place, (0, w.V))
    save(w.O, w.out, place, (0, w.V))
    save_logs(w)


@piece
def system(w: Work):
    """B = diag(beta) P of a block."""
    for i in range(w.c):
        p, b, beta = row(w.Z, i), row(w.B, i), w.beta[i]
        for j in range(w.n):
            b[j] = beta * p[j]


@piece
def forward(w: Work, first: Whole, last: Whole):
    """u and r of the tasks first..last."""
    for n in range(first, last):
        begin_task(w, n)
        w.h, w.i = w.HEAD, 0
        while w.i < w.T:
            w.c = min(w.C, w.T - w.i)
            earlier(w)
            own(w)
            w.i += w.C


@piece
def own_vjp(w: Work):
    """y, dbeta, d and delta of the block; dV: the terms of du from later queries."""
    place = (w.BATCH, w.h, w.FIRST + w.j)
    w.i, w.c, w.is_diagonal = w.j, w.n, 1
    load_queries(w)
    load_column(w.logs, place, w.log)
    load_column(w.in_beta, place, w.beta)
    load(w.in_du, place, (0, w.V), w.rhs)
    if w.gated:
        pair_sums(w)
    logits(w)
    for i in range(w.c):
        bias(w, i)
        p, x, more = row(w.Z, i), row(w.rhs, i), row(w.dV, i)
        for j in range(w.n):
            p[j] = exp(p[j] - w.log[i])
        for j in range(w.V):
            x[j] += more[j]
    system(w)
    solve_transposed(w.B, w.rhs)
    save(w.rhs, w.out_dv, place, (0, w.V))
    r = tokens_of(w.out, w.scale, place, w.c, (0, w.V))
    for i in range(w.c):
        x = dot(row(r, i), row(w.rhs, i), w.V)
        w.delta[w.i + i] = -w.beta[i] * x
        w.scales[i] = -w.beta[i]
        w.log[i] = -x
    save_column(w.log, w.out_dbeta, place)
    scale_rows(w.rhs, w.scales)
    save(w.rhs, w.in_dout, place, (0, w.V))


@piece
def block_vjp(w: Work):
    """A block of keys and its system: later queries, the system, its own queries."""
    begin_keys(w)
    w.i = w.j + w.N
    queries(w)
    own_vjp(w)
    tile(w)
    place = (w.BATCH, w.h, w.FIRST + w.j)
    save(w.dK, w.out_dk, place, (0, w.K))
    if w.gated:
        add_columns(w)


@piece
def backward(w: Work, first: Whole, last: Whole):
    """Gradients of the tasks first..last."""
    for n in range(first, last):
        begin_task(w, n)
        for h in range(w.HEAD, w.HEAD + w.heads):
            w.h, w.is_past = h, 0
            begin_gates(w)
            w.j = (w.T - 1) // w.N * w.N
            while w.j >= 0:
                w.n = min(w.N, w.T - w.j)
                block_vjp(w)
                w.j -= w.N
            w.is_past = 1
            for j in range(0, w.L, w.N):
                w.j, w.n = j, min(w.N, w.L - j)
                keys(w)
                save_keys(w)
            if w.gated:
                end_head(w)
