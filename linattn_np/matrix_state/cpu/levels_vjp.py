"""The adjoint of levels.py: tokens from the last to the first, the states before each token computed again.

D_l is the gradient of level l after token t, and c = scale dout_t. A level l below n has merged into it: D_l is D_n.

    X_l = e^{g} S_l - beta k^T (k e^{g} S_l),  y_l = q X_l          dlam_l = <c, y_l>,  dq += lam_l c X_l^T
    M = D_l + lam_l q^T c,  u = k M,  p = k e^g S_l                 dbeta -= <u, p>,  dk -= beta (M p^T + e^g S_l u^T)
    N = M - beta k^T u                                              dg += <N, e^g S_l>,  D_l <- e^g N
    level 0, X_0 = beta k^T v,  u = k D_n + lam_0 <q, k> c          dv = beta u,  dbeta += <u, v>,  ...

States of TRACE tokens are stored at once, those before each such block of a run of RUN tokens (marks), and those
before each run (starts).
"""

from __future__ import annotations

from ...ops.cpu.numbers import number
from ...ops.cpu.rows import clear, fill, scaled, times
from ...ops.cpu.storage import load, save, save_column
from ...runtime.pieces.piece import Matrix, Number, Truth, Vector, Whole, piece
from ...runtime.pieces.registers import fma, folded, store, total
from ...runtime.pieces.tiles import dot
from ...runtime.pieces.views import columns, row, rows
from .levels import (
    RUN,
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
    """Save the gradients that are sums over all blocks of columns."""
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
    """Gradients by a block of columns, RUN tokens at a time: the states before each run are `starts`."""
    own, after, each = (w.column, w.width), position + w.c, w.levels * w.K
    for level in range(1, w.levels + 1):
        if has(after, level):
            at = (level - 1) * w.K
            if w.has_dend:
                load(w.dend, (w.STATE, w.HEAD, at), own, rows(w.grads, level * (w.K + 1), w.K))
            else:
                clear(rows(w.grads, level * (w.K + 1), w.K))
    if w.given:
        load_levels(w, position)
    if w.c:
        load(w.v, (w.BATCH, w.HEAD, w.FIRST), own, w.values)
    for j in range(w.queries if w.c else 0):
        c = rows(w.outs, j * w.c, w.c)
        load(w.dout, (w.BATCH, w.HEAD * w.queries + j, w.FIRST), own, c)
        scaled(c, w.factors, c)
    runs = (w.c + RUN - 1) // RUN
    advance_blocks(w, position, 0, runs - 1, RUN, w.starts)
    for n in range(runs):
        m = runs - 1 - n
        if n > 0:
            copy_levels(w, position + m * RUN, rows(w.starts, m * each, each), w.work)
        run_vjp(w, position, m * RUN, min(w.c, (m + 1) * RUN))
    if w.c:
        save(columns(w.dvalues, 0, w.width), w.dv, (w.BATCH, w.HEAD, w.FIRST), own)
    if w.given:
        save_gradients(w, position)


@piece
def advance_blocks(w: Work, position: Whole, first: Whole, blocks: Whole, size: Whole, marks: Matrix):
    """The levels after `blocks` blocks of tokens from `first` on; marks: those before each block."""
    each = w.levels * w.K
    for b in range(blocks):
        start = first + b * size
        copy_levels(w, position + start, w.work, rows(marks, b * each, each))
        for i in range(start, start + size):
            token(w, i, position + i, w.work, w.work, False, w.predictions)


@piece
def run_vjp(w: Work, position: Whole, first: Whole, last: Whole):
    """Gradients of tokens first..last from the levels before them; TRACE tokens at a time."""
    each, blocks = w.levels * w.K, (last - first + TRACE - 1) // TRACE
    advance_blocks(w, position, first, blocks - 1, TRACE, w.marks)
    for n in range(blocks):
        b = blocks - 1 - n
        start, stop = first + b * TRACE, min(last, first + (b + 1) * TRACE)
        if n > 0:
            copy_levels(w, position + start, rows(w.marks, b * each, each), w.trace)
        else:
            copy_levels(w, position + start, w.work, w.trace)
        for m in range(stop - start - 1):
            before, after = rows(w.trace, m * each, each), rows(w.trace, (m + 1) * each, each)
            predictions = rows(w.predictions, m * w.levels, w.levels)
            token(w, start + m, position + start + m, before, after, False, predictions)
            read_levels(w, start + m, position + start + m, before, predictions, True)
        for a in range(stop - start):
            m = stop - start - 1 - a
            S, predictions = rows(w.trace, m * each, each), rows(w.predictions, m * w.levels, w.levels)
            if a == 0:
                read_levels(w, start + m, position + start + m, S, predictions, False)
            token_vjp(w, start + m, position + start + m, S, predictions)


@piece
def save_gradients(w: Work, position: Whole):
    """Gradients of the initial levels, 0 of those that are empty."""
    for level in range(1, w.levels + 1):
        at = (level - 1) * w.K
        d = rows(w.grads, level * (w.K + 1), w.K)
        if not has(position, level):
            clear(d)
        save(columns(d, 0, w.width), w.dstate, (w.STATE, w.HEAD, at), (w.column, w.width))


@piece
def read_levels(w: Work, i: Whole, position: Whole, S: Matrix, predictions: Matrix, has_predictions: Truth):
    """dlam of token i, and the rows p_l of `predictions`, from the levels S before it; has_predictions: from k S."""
    decay, beta, k = w.fade[i], w.betas[i], row(w.keys, i)
    for level in range(1, w.levels):
        if has(position, level):
            own, p = rows(S, (level - 1) * w.K, w.K), row(predictions, level)
            if w.delta:
                if not has_predictions:
                    read_level(own, k, p)
                times(decay, p, None, p)
            for j in range(w.queries):
                q, c = row(w.query, j * w.c + i), row(w.outs, j * w.c + i)
                read_level(own, q, w.seen)
                x = decay * dot(c, w.seen, w.width_lanes)
                if w.delta:
                    x -= beta * dot(q, k, w.K) * dot(c, p, w.width_lanes)
                w.dweights[i, level] += x


@piece
def token_vjp(w: Work, i: Whole, position: Whole, S: Matrix, predictions: Matrix):
    """Gradients of token i from those of the levels after it, to those of the levels S before it."""
    into = merged_level(position)
    merged = rows(w.grads, into * (w.K + 1), w.K)
    read_level(merged, row(w.keys, i), w.read)
    written_vjp(w, i, merged)
    if w.delta:
        erased_vjp(w, i, position, into, predictions)
    levels_vjp(w, i, position, into, S, predictions)


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


@piece(of="delta")
def erased_vjp(w: Work, i: Whole, position: Whole, into: Whole, predictions: Matrix):
    """u of every level, and the terms of u and p in dbeta and dq."""
    beta, k, one = w.betas[i], row(w.keys, i), number(w.read, 1)
    for level in range(1, w.levels):
        if has(position, level):
            u, p, f = row(w.dwrites, level), row(predictions, level), w.weights[i, level]
            if level < into:
                times(one, w.read, None, u)
            else:
                read_level(rows(w.grads, level * (w.K + 1), w.K), k, u)
            for j in range(w.queries):
                q, c, dq = row(w.query, j * w.c + i), row(w.outs, j * w.c + i), row(w.dquery, j * w.c + i)
                add_weighted(f * dot(q, k, w.K), c, number(c, 0), c, u)
                read = f * beta * dot(c, p, w.width_lanes)
                for m in range(w.K):
                    dq[m] -= read * k[m]
            w.dbetas[i] -= dot(u, p, w.width_lanes)


@piece
def levels_vjp(w: Work, i: Whole, position: Whole, into: Whole, S: Matrix, predictions: Matrix):
    """D of every level before the token, dg and the other terms of dq and dk: row by row, for all levels at once."""
    decay, beta, c, K, levels, queries, delta = w.fade[i], w.betas[i], w.c, w.K, w.levels, w.queries, w.delta
    grads, outs, query, dquery, k, dk = w.grads, w.outs, w.query, w.dquery, row(w.keys, i), row(w.dkeys, i)
    weights, back, overlap = row(w.weights, i), w.dwrites, zeros(S)
    for m in range(K):
        answered, read, rest = zeros(S), zeros(S), zeros(S)
        for j in range(queries):
            answered = fma(query[j * c + i, m], load_block(row(outs, j * c + i), 0), answered)
        for level in range(1, levels):
            if has(position, level):
                f, s = weights[level], decay * load_block(row(S, (level - 1) * K + m), 0)
                M = fma(f, answered, load_block(row(grads, (into if level < into else level) * (K + 1) + m), 0))
                read = fma(f, s, read)
                if delta:
                    u = load_block(row(back, level), 0)
                    rest = rest + fma(M, load_block(row(predictions, level), 0), s * u)
                    M = fma(-(beta * k[m]), u, M)
                overlap = fma(M, s, overlap)
                store(decay * M, row(grads, level * (K + 1) + m), 0)
        for j in range(queries):
            dquery[j * c + i, m] += total(folded(load_block(row(outs, j * c + i), 0) * read))
        if delta:
            dk[m] -= beta * total(folded(rest))
    w.dfade[i] += total(folded(overlap))
