"""The transpose of the first layer (hidden.py), beside that of the last one (backward.py).

du = ds * gelu'(y),   dr += du A,   dA += du^T r,   dy = ds * u * gelu''(y) + dh * gelu'(y),   dx += dy A1^T
"""

from __future__ import annotations

from ...ops.cpu.loops import over
from ...ops.cpu.numbers import number
from ...ops.cpu.products import FULL, product, transpose
from ...ops.cpu.rows import add, clear, overlap, scale_rows, scaled
from ...runtime.pieces.piece import Matrix, Number, Whole, piece
from ...runtime.pieces.tiles import dot
from ...runtime.pieces.views import columns, row, transposed
from .ends import close_back
from .hidden import combined1, curve, slopes
from .memory import column_of, copy
from .workspace import Work


@piece
def open_hidden(w: Work):
    """Back through the end of a mini-batch."""
    if w.gain:
        combined1(w, 0, w.Y1)
    total = close_back(w, w.Y1, w.A1, w.dW1, w.dA1)
    if w.gain:
        w.dgains[w.place] += number(w.dW1, total)


@piece
def begin_hidden(w: Work):
    """Gradients of a tile, before anything is added to them."""
    clear(w.ds)
    clear(w.dx)
    clear(w.nW1)
    clear(w.nS1)
    copy(w.dA1, w.nA1)


@piece
def add_multiple(f: Number, A: Matrix, out: Matrix):
    """out += f A"""
    for i in range(len(out)):
        a, to = row(A, i), row(out, i)
        for j in range(len(to)):
            to[j] += f * a[j]


@piece
def end_hidden_back(w: Work, end: Whole, d: Matrix):
    """Back through the last weights (end 0) or momentum (1), of the gradient d."""
    at = w.mask_row + w.N + end
    mask, dmask, c, dc = row(w.masks, at), row(w.dmasks, at), row(w.c, at), row(w.dc, at)
    product(FULL, w.x, d, w.T1)
    for i in range(w.n):
        dmask[i] += dot(row(w.T1, i), row(w.s, i), w.M)
    scale_rows(w.T1, mask)
    add(w.T1, w.ds)
    scaled(w.s, mask, w.R1)
    transpose(d, w.back1)
    product(FULL, w.R1, w.back1, w.dx, added=w.dx)
    dc[0] += number(w.T1, overlap(d, w.W1))
    add_multiple(c[0], d, w.nW1)
    if w.momentum:
        dc[1] += number(w.T1, overlap(d, w.S1))
        add_multiple(c[1], d, w.nS1)


@piece
def base_hidden_back(w: Work, base: Matrix, n: Whole, dbase: Matrix):
    """Back through yq += c_n xq B_n, dyq lying in T1."""
    at = w.mask_row
    column_of(w, at, n)
    product(FULL, w.xq, base, w.R1)
    for i in range(w.n):
        row(w.dc, at + i)[n] += dot(row(w.R1, i), row(w.T1, i), w.M)
    transpose(base, w.back1)
    product(FULL, w.T1, w.back1, w.dxq, rows=w.column, added=w.dxq)
    scaled(w.T1, w.column, w.R1)
    product(FULL, transposed(w.xq), w.R1, dbase, added=dbase)


@piece
def hidden_queries_back(w: Work):
    """Back through the queries, from dq: the gradient of the last layer's."""
    slopes(w.yq, w.dq, w.T1)
    transpose(w.s, w.sT)
    product(FULL, w.T1, w.sT, w.G)
    product(FULL, w.xq, w.xT, w.P)
    for i in range(w.n):
        g, p, mask, dmask = row(w.G, i), row(w.P, i), row(w.masks, w.mask_row + i), row(w.dmasks, w.mask_row + i)
        for j in range(len(g)):
            dmask[j] += g[j] * p[j]
            g[j] *= mask[j]
            p[j] *= mask[j]
    product(FULL, w.G, w.x, w.dxq, added=w.dxq)
    product(FULL, transposed(w.G), w.xq, w.dx, added=w.dx)
    product(FULL, transposed(w.P), w.T1, w.ds, added=w.ds)
    base_hidden_back(w, w.W1, 0, w.nW1)
    if w.momentum:
        base_hidden_back(w, w.S1, 1, w.nS1)
    if w.gain:
        base_hidden_back(w, w.A1, w.B - 1, w.nA1)


@piece
def hidden_factors_back(w: Work):
    """du, dr += du A and nA += du^T r; dy, of s alone."""
    for i in range(w.n):
        y, ds, du = row(w.y, i), row(w.ds, i), row(w.du, i)
        over(curve, y, ds, row(columns(w.u, 0, w.M), i), 0, row(w.dy, i))
        du[w.D - 1] = 0  # of the bias
    slopes(w.y, w.ds, columns(w.du, 0, w.M))
    product(FULL, w.du, w.A, w.dr, added=w.dr)
    product(FULL, transposed(w.du), w.r, w.nA, added=w.nA)


@piece
def hidden_rows_back(w: Work):
    """Back through the hidden rows of the keys, from dk: the gradient of the last layer's."""
    slopes(w.y, w.dk, w.T1)
    add(w.T1, w.dy)
    product(FULL, w.xT, w.dy, w.nA1, added=w.nA1)
    transpose(w.A1, w.back1)
    product(FULL, w.dy, w.back1, w.dx, added=w.dx)
