"""The transpose of a head, from the last tile to the first: docs/cores/fast_weights.md has the equations.

dW, dS, dA are gradients after the tile, nW, nS, nA those before it.
"""

from __future__ import annotations

from ...ops.cpu.numbers import number
from ...ops.cpu.products import FULL, product, solve_transposed, transpose
from ...ops.cpu.rows import clear
from ...ops.cpu.storage import load, save
from ...runtime.pieces.piece import Matrix, Vector, Whole, piece
from ...runtime.pieces.tiles import dot
from ...runtime.pieces.views import columns, row, transposed
from .ends import close_back, restore_rows, store_rows
from .forward import begin_task, begin_tile, error, gradient, read
from .hidden_backward import (
    begin_hidden,
    end_hidden_back,
    hidden_factors_back,
    hidden_queries_back,
    hidden_rows_back,
    open_hidden,
)
from .layer import base_back, combined, end_base_back, end_rows_back, masked_back
from .memory import copy
from .norm import project, standard
from .workspace import Work


@piece
def reopen(w: Work):
    """Back through the end of a mini-batch."""
    if w.gain:
        combined(w, 0, w.kT, w.r, w.R, w.W, w.S, w.Y)
    close_back(w, w.Y, w.A, w.dW, w.dA)


@piece
def end_back(w: Work, end: Whole, d: Matrix):
    """Back through the last weights (end 0) or momentum (1), of the gradient d."""
    end_rows_back(w, end, d, w.k, w.r, w.dk, w.dr, w.T, w.R, w.back)
    end_base_back(w, end, 0, d, w.W, w.nW)
    if w.momentum:
        end_base_back(w, end, 1, d, w.S, w.nS)


@piece
def outputs_back(w: Work):
    """R = dO: back through q + LN(O)."""
    to = w.dq
    if w.hidden:
        to = w.dxq
    clear(to)
    if w.normed:
        standard(w.O, w.eps, w.XO, w.over_O)
        a, g, dg, db, over = w.a, w.weight, w.dweight, w.dshift, w.over_O
        for i in range(w.n):
            d, x, dq = row(w.dout, i), row(w.XO, i), row(to, i)
            for j in range(len(d)):
                a[j] = g[j] * d[j]
                dg[j] += d[j] * x[j]
                db[j] += d[j]
                dq[j] = d[j]
            project(a, x, over[i], row(w.R, i))
    else:
        copy(w.dout, w.R)


@piece
def read_back(w: Work):
    """Back through the queries."""
    load(w.in_dout, (w.BATCH, w.HEAD, w.START), (0, w.V), w.dout)
    read(w)
    outputs_back(w)
    if w.hidden:
        clear(w.dq)
    masked_back(w, w.q, w.k, w.kT, w.R, w.r, w.rT, w.dq, w.dk, w.dr)
    base_back(w, w.q, w.R, w.dq, w.W, w.mask_row, 0, w.nW, w.T, w.back)
    if w.momentum:
        base_back(w, w.q, w.R, w.dq, w.S, w.mask_row, 1, w.nS, w.T, w.back)
    if w.gain:
        base_back(w, w.q, w.R, w.dq, w.A, w.mask_row, w.B - 1, w.nA, w.T, w.back)
    dq = w.dq
    if w.hidden:
        hidden_queries_back(w)
        dq = w.dxq
    save(columns(dq, 0, w.K), w.out_dq, (w.BATCH, w.HEAD, w.START), (0, w.K))


@piece
def through_norm(w: Work, i: Whole, de: Vector, dz: Vector):
    """de and dz of r = P(weight e), from dr; p = P(dr)."""
    n = w.V
    size, f = number(w.r, n), w.over[i]
    x, r, dr, g, dg, p = row(w.X, i), row(w.r, i), row(w.dr, i), w.weight, w.dweight, row(w.T, i)
    project(dr, x, f, p)
    error(w, i, de)
    along = dot(dr, x, n) / size
    for j in range(n):
        dg[j] += de[j] * p[j]
        de[j] *= g[j]  # a
    ax, ap = dot(de, x, n) / size, dot(de, p, n) / size
    for j in range(n):
        dz[j] = -(r[j] * along + p[j] * ax + x[j] * ap) * f
        de[j] = g[j] * p[j]


@piece
def prediction_back(w: Work, i: Whole, de: Vector, dz: Vector):
    """dk and dz += of y = k + LN(z), from dy = de; through_norm has been there."""
    x, dk, g, dg, db, p, a = row(w.X, i), row(w.dk, i), w.weight, w.dweight, w.dshift, row(w.T, i), w.a
    if w.hidden:
        dk = row(w.dx, i)
    for j in range(len(de)):
        dk[j] += de[j]
        dg[j] += de[j] * x[j]
        db[j] += de[j]
        a[j] = g[j] * de[j]
    project(a, x, w.over[i], p)
    for j in range(len(dz)):
        dz[j] += p[j]


@piece
def gradient_back(w: Work):
    """Back through the inner gradient, from dr: dv, dk, and nA; R: dz, O: de."""
    if w.hidden:
        hidden_factors_back(w)
    for i in range(w.n):
        dr, de, dz, v = row(w.dr, i), row(w.O, i), row(w.R, i), row(w.v, i)
        if w.normed:
            through_norm(w, i, de, dz)
        for j in range(len(dz)):
            if not w.normed:
                de[j], dz[j] = dr[j], dr[j] if w.squared else 0
            v[j] = -de[j]
        if w.normed and w.squared:
            prediction_back(w, i, de, dz)
    product(FULL, w.kT, w.R, w.nA, added=w.nA)
    transpose(w.A, w.back)
    product(FULL, w.R, w.back, w.dk, added=w.dk)
    if w.hidden:
        hidden_rows_back(w)


@piece
def solved_back(w: Work):
    """Back through the system of exact gradients: x = (I + L)^-T dr, in place of dr; dv, dk, nW, nS."""
    at = w.mask_row + w.N + 2
    solve_transposed(w.L, w.dr)
    transpose(w.r, w.rT)
    product(FULL, w.dr, w.rT, w.G)
    product(FULL, w.k, w.kT, w.P)
    for i in range(w.n):
        g, p, m, dm = row(w.G, i), row(w.P, i), row(w.masks, at + i), row(w.dmasks, at + i)
        for j in range(len(g)):
            dm[j] = g[j] * p[j] if j < i else 0
            g[j] = g[j] * m[j] if j < i else 0
        x, v = row(w.dr, i), row(w.v, i)
        for j in range(len(v)):
            v[j] = -x[j]
    product(FULL, w.G, w.k, w.dk, added=w.dk)
    product(FULL, transposed(w.G), w.k, w.dk, added=w.dk)
    base_back(w, w.k, w.dr, w.dk, w.W, at, 0, w.nW, w.T, w.back)
    if w.momentum:
        base_back(w, w.k, w.dr, w.dk, w.S, at, 1, w.nS, w.T, w.back)


@piece
def save_gradients(w: Work):
    """dv, which lies in v, and dk."""
    save(w.v, w.out_dv, (w.BATCH, w.HEAD, w.START), (0, w.V))
    dk = w.dk
    if w.hidden:
        dk = w.dx
    save(columns(dk, 0, w.K), w.out_dk, (w.BATCH, w.HEAD, w.START), (0, w.K))


@piece
def tile_back(w: Work):
    """A tile, whose states before it have been restored."""
    gradient(w)
    if w.CLOSES:
        reopen(w)
        if w.hidden:
            open_hidden(w)
    if w.hidden:
        begin_hidden(w)
    clear(w.dr)
    clear(w.dk)
    clear(w.nW)
    clear(w.nS)
    copy(w.dA, w.nA)
    end_back(w, 0, w.dW)
    if w.momentum:
        end_back(w, 1, w.dS)
    if w.hidden:
        end_hidden_back(w, 0, w.dW1)
        if w.momentum:
            end_hidden_back(w, 1, w.dS1)
    if w.has_dout:
        read_back(w)
    if w.exact:
        solved_back(w)
    else:
        gradient_back(w)
    save_gradients(w)
    copy(w.nW, w.dW)
    copy(w.nS, w.dS)
    copy(w.nA, w.dA)
    if w.hidden:
        copy(w.nW1, w.dW1)
        copy(w.nS1, w.dS1)
        copy(w.nA1, w.dA1)


@piece
def backward(w: Work, first_task: Whole, last_task: Whole):
    """Gradients of the tasks; last_W, ...: of the final states, first_W, ...: of the initial ones."""
    for task in range(first_task, last_task):
        begin_task(w, task)
        clear(w.dS)
        restore_rows(w, w.PLACE * w.D, w.last_W, w.last_S, w.last_A, w.dW, w.dS, w.dA)
        if w.hidden:
            clear(w.dS1)
            restore_rows(w, w.PLACE * w.X_D, w.last_W1, w.last_S1, w.last_A1, w.dW1, w.dS1, w.dA1)
        dg, db = w.dweight, w.dshift
        for j in range(len(dg)):
            dg[j], db[j] = 0, 0
        for n in range(w.tiles):
            tile = w.tiles - 1 - n
            begin_tile(w, tile)
            restore_rows(w, w.place * w.D, w.marks_W, w.marks_S, w.marks_A, w.W, w.S, w.A)
            if w.hidden:
                restore_rows(w, w.place * w.X_D, w.marks_W1, w.marks_S1, w.marks_A1, w.W1, w.S1, w.A1)
            tile_back(w)
        store_rows(w, w.dW, w.dS, w.dA, w.PLACE * w.D, w.first_W, w.first_S, w.first_A)
        if w.hidden:
            store_rows(w, w.dW1, w.dS1, w.dA1, w.PLACE * w.X_D, w.first_W1, w.first_S1, w.first_A1)
        if w.normed:
            g, b = row(w.dweights, w.PLACE), row(w.dshifts, w.PLACE)
            for j in range(len(dg)):
                g[j], b[j] = dg[j], db[j]
