"""The adjoint of levels.py: tokens from the last to the first, the states before each token computed again.

D_l is the gradient of level l after token t, and c = scale dout_t. A level l below n has merged into it: D_l is D_n.

    X_l = e^{g} S_l - beta k^T (k e^{g} S_l),  y_l = q X_l          dlam_l = <c, y_l>,  dq += lam_l c X_l^T
    M = D_l + lam_l q^T c,  u = k M,  p = k e^g S_l                 dbeta -= <u, p>,  dk -= beta (M p^T + e^g S_l u^T)
    N = M - beta k^T u                                              dg += <N, e^g S_l>,  D_l <- e^g N
    level 0, X_0 = beta k^T v,  u = k D_n + lam_0 <q, k> c          dv = beta u,  dbeta += <u, v>,  ...

States of TRACE tokens are held at once; those before each such block of tokens are marks.
"""

from __future__ import annotations

from ...ops.cpu.numbers import number
from ...ops.cpu.rows import clear, fill, scaled, times
from ...ops.cpu.storage import load, save, save_column
from ...runtime.pieces.piece import Matrix, Number, Vector, Whole, piece
from ...runtime.pieces.registers import fma, folded, store, total
from ...runtime.pieces.tiles import dot
from ...runtime.pieces.views import columns, row, rows
from .levels import (
    TRACE,
    Work,
    add_weighted,
    begin_block,
    begin_sequence,
    has,
    is_refused,
    load_block,
    load_levels,
    merged_level,
    position_of,
    read_level,
    token,
    zeros,
)


@piece
def copy_levels(w: Work, position: Whole, S: Matrix, to: Matrix):
    """The levels that have tokens."""
    for level in range(1, w.levels + 1):
        if has(position, level):
            at = (level - 1) * w.K
            scaled(rows(S, at, w.K), None, rows(to, at, w.K))


@piece
def backward(w: Work, first: Whole, last: Whole):
    """Gradients of tasks first..last."""
    if is_refused(w):
        return
    for n in range(first, last):
        begin_sequence(w, n)
        fill(w.factors, w.scale)
        for gradient in (w.dquery, w.dkeys, w.dweights):
            clear(gradient)
        for i in range(w.c):
            w.dfade[i], w.dbetas[i] = 0, 0
        for column in range(0, w.V, w.width_lanes):
            begin_block(w, column)
            backward_block(w, position_of(w, n // w.H))
        if w.c:
            save_tokens(w)


@piece
def save_tokens(w: Work):
    """The gradients of what all blocks of columns read."""
    place = (w.BATCH, w.HEAD, w.FIRST)
    for j in range(w.queries):
        save(columns(rows(w.dquery, j * w.c, w.c), 0, w.K), w.dq, (w.BATCH, w.HEAD * w.queries + j, w.FIRST), (0, w.K))
    save(columns(w.dkeys, 0, w.K), w.dk, place, (0, w.K))
    save_column(w.dfade, w.dg, place)
    if w.delta:
        save_column(w.dbetas, w.dbeta, place)
    save(columns(w.dweights, 0, w.levels), w.dlam, place, (0, w.levels))


@piece
def backward_block(w: Work, position: Whole):
    """Gradients by a block of columns; TRACE tokens at a time."""
    own, after, each = (w.column, w.width), position + w.c, w.levels * w.K
    for level in range(1, w.levels + 1):
        if has(after, level):
            at = (level - 1) * w.K
            if w.has_dend:
                load(w.dend, (w.STATE, w.HEAD, at), own, rows(w.grads, at, w.K))
            else:
                clear(rows(w.grads, at, w.K))
    if w.given:
        load_levels(w, position)
    if w.c:
        load(w.v, (w.BATCH, w.HEAD, w.FIRST), own, w.values)
    for j in range(w.queries if w.c else 0):
        c = rows(w.outs, j * w.c, w.c)
        load(w.dout, (w.BATCH, w.HEAD * w.queries + j, w.FIRST), own, c)
        scaled(c, w.factors, c)
    blocks = (w.c + TRACE - 1) // TRACE
    for b in range(blocks - 1):
        copy_levels(w, position + b * TRACE, w.work, rows(w.marks, b * each, each))
        for i in range(b * TRACE, (b + 1) * TRACE):
            token(w, i, position + i, w.work, w.work, False)
    for n in range(blocks):
        b = blocks - 1 - n
        start, stop = b * TRACE, min(w.c, (b + 1) * TRACE)
        if n > 0:
            copy_levels(w, position + start, rows(w.marks, b * each, each), w.work)
        for i in range(start, stop):
            copy_levels(w, position + i, w.work, rows(w.trace, (i - start) * each, each))
            if i + 1 < stop:
                token(w, i, position + i, w.work, w.work, False)
        for m in range(stop - start):
            i = stop - 1 - m
            token_vjp(w, i, position + i, rows(w.trace, (i - start) * each, each))
    if w.c:
        save(columns(w.dvalues, 0, w.width), w.dv, (w.BATCH, w.HEAD, w.FIRST), own)
    if w.given:
        save_gradients(w, position)


@piece
def save_gradients(w: Work, position: Whole):
    """Gradients of the initial levels, 0 of those that are empty."""
    for level in range(1, w.levels + 1):
        at = (level - 1) * w.K
        d = rows(w.grads, at, w.K)
        if not has(position, level):
            clear(d)
        save(columns(d, 0, w.width), w.dstate, (w.STATE, w.HEAD, at), (w.column, w.width))


@piece
def token_vjp(w: Work, i: Whole, position: Whole, S: Matrix):
    """Gradients of token i from those of the levels after it, to those of the levels S before it."""
    into, k = merged_level(position), row(w.keys, i)
    merged = rows(w.grads, (into - 1) * w.K, w.K)
    read_level(merged, k, w.read)
    written_vjp(w, i, merged)
    for level in range(1, w.levels):
        if has(position, level):
            at = (level - 1) * w.K
            own, d = rows(S, at, w.K), rows(w.grads, at, w.K)
            if w.delta:
                erased_vjp(w, i, level, own, merged if level < into else d, d)
            else:
                kept_vjp(w, i, level, own, merged if level < into else d, d)


@piece
def written_vjp(w: Work, i: Whole, d: Matrix):
    """Of level 0, beta k^T v; d: of the level that it has merged into, w.read = k d."""
    k, dk, v, u, beta, weights = (
        row(w.keys, i),
        row(w.dkeys, i),
        row(w.values, i),
        w.into,
        w.betas[i],
        row(w.weights, i),
    )
    times(number(v, 1), w.read, None, u)
    add_row_dots(beta, d, v, dk)
    for j in range(w.queries):
        at = j * w.c + i
        q, c, dq = row(w.query, at), row(w.outs, at), row(w.dquery, at)
        along, read = dot(q, k, w.K), dot(c, v, w.width_lanes)
        w.dweights[i, 0] += beta * along * read
        f = weights[0] * beta * read
        for m in range(w.K):
            dq[m] += f * k[m]
            dk[m] += f * q[m]
        add_weighted(weights[0] * along, c, number(v, 0), v, u)
    times(beta, u, None, row(w.dvalues, i))
    w.dbetas[i] += dot(u, v, w.width_lanes)


@piece
def add_row_dots(a: Number, A: Matrix, x: Vector, out: Vector):
    """out_i += a A_i . x"""
    y = load_block(x, 0)
    for i in range(len(A)):
        out[i] += a * total(folded(load_block(row(A, i), 0) * y))


@piece
def kept_vjp(w: Work, i: Whole, level: Whole, S: Matrix, d: Matrix, to: Matrix):
    """Of a level that has decayed; d: after the token, to: before it."""
    decay, f = w.fade[i], w.weights[i, level]
    queries, c, outs, query, dquery = w.queries, w.c, w.outs, w.query, w.dquery
    overlap, read = zeros(S), number(outs, 0)
    for m in range(len(S)):
        s, M = decay * load_block(row(S, m), 0), load_block(row(d, m), 0)
        for j in range(queries):
            at = j * c + i
            cotangent = load_block(row(outs, at), 0)
            M = fma(f * query[at, m], cotangent, M)
            x = total(folded(cotangent * s))
            dquery[at, m] += f * x
            read += query[at, m] * x
        overlap = fma(M, s, overlap)
        store(decay * M, row(to, m), 0)
    w.dfade[i] += total(folded(overlap))
    w.dweights[i, level] += read


@piece(of="delta")
def erased_vjp(w: Work, i: Whole, level: Whole, S: Matrix, d: Matrix, to: Matrix):
    """Of a level that has decayed and was erased; d: after the token, to: before it."""
    decay, beta, f, k, dk = w.fade[i], w.betas[i], w.weights[i, level], row(w.keys, i), row(w.dkeys, i)
    read_level(S, k, w.predicted)
    times(decay, w.predicted, None, w.predicted)
    read_level(d, k, w.into)
    for j in range(w.queries):
        at = j * w.c + i
        q, c = row(w.query, at), row(w.outs, at)
        along, read = dot(q, k, w.K), dot(c, w.predicted, w.width_lanes)
        w.dweights[i, level] -= beta * along * read
        add_weighted(f * along, c, number(c, 0), c, w.into)
        dq = row(w.dquery, at)
        for m in range(w.K):
            dq[m] -= f * beta * read * k[m]
    w.dbetas[i] -= dot(w.into, w.predicted, w.width_lanes)
    queries, c, outs, query, dquery = w.queries, w.c, w.outs, w.query, w.dquery
    predicted, u, overlap, read = load_block(w.predicted, 0), load_block(w.into, 0), zeros(S), number(outs, 0)
    for m in range(len(S)):
        s, M = decay * load_block(row(S, m), 0), load_block(row(d, m), 0)
        for j in range(queries):
            at = j * c + i
            cotangent = load_block(row(outs, at), 0)
            M = fma(f * query[at, m], cotangent, M)
            x = total(folded(cotangent * s))
            dquery[at, m] += f * x
            read += query[at, m] * x
        dk[m] -= beta * total(folded(fma(M, predicted, s * u)))
        M = fma(-(beta * k[m]), u, M)
        overlap = fma(M, s, overlap)
        store(decay * M, row(to, m), 0)
    w.dfade[i] += total(folded(overlap))
    w.dweights[i, level] += read
