"""A head, tile by tile: the gradient at A, the queries, the state after the tile (array/chunks.py has the equations).

A bias is the weight of a channel that is 1.
"""

from __future__ import annotations

from ...ops.cpu.products import FULL, product, solve, transpose
from ...ops.cpu.storage import load, save
from ...runtime.pieces.piece import Vector, Whole, piece
from ...runtime.pieces.views import row
from .ends import close, restore_rows, store_rows
from .hidden import end_hidden, hidden_gradient, hidden_queries, hidden_rows
from .layer import add_base, combined, read_rows
from .norm import project, standard
from .workspace import Work


@piece
def begin_task(w: Work, task: Whole):
    """The head of a task and its norm."""
    w.BATCH, w.HEAD, w.PLACE = w.tasks[task, 0], w.tasks[task, 1], w.tasks[task, 2]
    if w.normed:
        weight, shift, g, b = w.weight, w.shift, row(w.weights, w.HEAD), row(w.shifts, w.HEAD)
        for j in range(len(weight)):
            weight[j], shift[j] = g[j], b[j]


@piece
def begin_tile(w: Work, tile: Whole):
    """Keys, values and queries of a tile."""
    w.START, w.n, w.CLOSES = w.spans[tile, 0], w.spans[tile, 1], w.spans[tile, 2]
    w.place = w.PLACE * w.tiles + tile
    w.mask_row = w.place * w.block
    at = (w.BATCH, w.HEAD, w.START)
    k, q = w.k, w.q
    if w.hidden:
        k, q = w.x, w.xq
    load(w.in_k, at, (0, w.K), k)
    load(w.in_v, at, (0, w.V), w.v)
    if w.has_q:
        load(w.in_q, at, (0, w.K), q)
    if w.biased:
        for i in range(w.n):
            k[i, w.K], q[i, w.K] = 1, 1
    if not w.hidden:
        transpose(w.k, w.kT)


@piece
def error(w: Work, i: Whole, e: Vector):
    """e = dl/dy of a token: y - v, or -v."""
    v, k, z, x = row(w.v, i), row(w.k, i), row(w.Z, i), row(w.X, i)
    if w.hidden:
        k = row(w.x, i)
    if not w.squared:
        for j in range(len(e)):
            e[j] = -v[j]
    elif w.normed:
        g, b = w.weight, w.shift
        for j in range(len(e)):
            e[j] = k[j] + g[j] * x[j] + b[j] - v[j]
    else:
        for j in range(len(e)):
            e[j] = z[j] - v[j]


@piece
def solved(w: Work):
    """r of gradients at the weights before each token: (I + L) r = k (c W + d S) - v, L = -m (.) k k^T."""
    at = w.mask_row + w.N + 2
    product(FULL, w.k, w.kT, w.P)
    for i in range(w.n):
        p, m, to, r, v = row(w.P, i), row(w.masks, at + i), row(w.L, i), row(w.r, i), row(w.v, i)
        for j in range(len(to)):
            to[j] = -m[j] * p[j] if j < i else 0
        for j in range(len(r)):
            r[j] = -v[j]
    add_base(w, w.k, w.W, at, 0, w.r)
    if w.momentum:
        add_base(w, w.k, w.S, at, 1, w.r)
    solve(w.L, w.r)


@piece
def gradient_at_anchor(w: Work):
    """r, the cotangents of k A."""
    product(FULL, w.k, w.A, w.Z)
    if w.normed:
        standard(w.Z, w.eps, w.X, w.over)
    a, g, over = w.a, w.weight, w.over
    for i in range(w.n):
        r = row(w.r, i)
        if w.normed:
            error(w, i, a)
            for j in range(len(a)):
                a[j] *= g[j]
            project(a, row(w.X, i), over[i], r)
        else:
            error(w, i, r)


@piece
def gradient(w: Work):
    """r, the cotangents of k A, or of k times the weights before each token; those of a hidden layer too."""
    if w.hidden:
        hidden_rows(w)
        transpose(w.k, w.kT)
    if w.exact:
        solved(w)
    else:
        gradient_at_anchor(w)
    if w.hidden:
        hidden_gradient(w)


@piece
def read(w: Work):
    """O, the products of queries with the weights that they read."""
    if w.hidden:
        hidden_queries(w)
    read_rows(w, w.q, w.kT, w.r, w.W, w.S, w.A, w.O)


@piece
def save_outputs(w: Work):
    """out = O, or q + LN(O)."""
    if w.normed:
        standard(w.O, w.eps, w.X, w.over)
        g, b = w.weight, w.shift
        for i in range(w.n):
            x, q, to = row(w.X, i), row(w.q, i), row(w.O, i)
            if w.hidden:
                q = row(w.xq, i)
            for j in range(len(to)):
                to[j] = q[j] + g[j] * x[j] + b[j]
    save(w.O, w.out, (w.BATCH, w.HEAD, w.START), (0, w.V))


@piece
def end_tile(w: Work):
    """W, S and A after the tile."""
    if w.hidden:
        end_hidden(w)
    combined(w, 0, w.kT, w.r, w.R, w.W, w.S, w.Y)
    if w.momentum:
        combined(w, 1, w.kT, w.r, w.R, w.W, w.S, w.S)
    close(w, w.Y, w.W, w.A)


@piece
def forward(w: Work, first: Whole, last: Whole):
    """Outputs and final states of the tasks first..last."""
    for task in range(first, last):
        begin_task(w, task)
        restore_rows(w, w.PLACE * w.D, w.first_W, w.first_S, w.first_A, w.W, w.S, w.A)
        if w.hidden:
            restore_rows(w, w.PLACE * w.X_D, w.first_W1, w.first_S1, w.first_A1, w.W1, w.S1, w.A1)
        for tile in range(w.tiles):
            begin_tile(w, tile)
            if w.keep:
                store_rows(w, w.W, w.S, w.A, w.place * w.D, w.marks_W, w.marks_S, w.marks_A)
                if w.hidden:
                    store_rows(w, w.W1, w.S1, w.A1, w.place * w.X_D, w.marks_W1, w.marks_S1, w.marks_A1)
            gradient(w)
            if w.has_q:
                read(w)
            end_tile(w)
            if w.has_q:
                save_outputs(w)
        store_rows(w, w.W, w.S, w.A, w.PLACE * w.D, w.last_W, w.last_S, w.last_A)
        if w.hidden:
            store_rows(w, w.W1, w.S1, w.A1, w.PLACE * w.X_D, w.last_W1, w.last_S1, w.last_A1)
