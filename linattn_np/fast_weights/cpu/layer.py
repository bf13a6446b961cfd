"""One layer, the last one or a hidden one: what its rows read, its weights after a tile, and the transposes of both.

    out_t = q_t (sum_n c_tn B_n) + sum_j m_tj (q_t . k_j) r_j

B_n are W, S (with momentum) and A (with gain), k_j the rows of keys, r_j the cotangents of their products. Transposes
add to the gradients.
"""

from __future__ import annotations

from ...ops.cpu.numbers import number
from ...ops.cpu.products import FULL, LEFT_LOWER, product, transpose
from ...ops.cpu.rows import add, hadamard_to, overlap, scale_rows, scaled
from ...runtime.pieces.piece import Matrix, Whole, piece
from ...runtime.pieces.tiles import dot
from ...runtime.pieces.views import row, rows, transposed
from .workspace import Work


@piece
def column_of(w: Work, at: Whole, n: Whole):
    """The coefficients of base n, from row `at` on."""
    c, to = rows(w.c, at, w.n), w.column
    for i in range(len(to)):
        to[i] = c[i, n]


@piece
def add_base(w: Work, x: Matrix, base: Matrix, at: Whole, n: Whole, out: Matrix):
    """out += c_n x B_n"""
    column_of(w, at, n)
    product(FULL, x, base, out, rows=w.column, added=out)


@piece
def base_back(w: Work, x: Matrix, d: Matrix, dx: Matrix, base: Matrix, at: Whole, n: Whole, dbase: Matrix, T: Matrix,
              back: Matrix):  # fmt: skip
    """The transpose of add_base, d the gradient of out: dc, dx and dB_n.   T, back: memory"""
    column_of(w, at, n)
    product(FULL, x, base, T)
    for i in range(w.n):
        row(w.dc, at + i)[n] += dot(row(T, i), row(d, i), T.shape[1])
    transpose(base, back)
    product(FULL, d, back, dx, rows=w.column, added=dx)
    scaled(d, w.column, T)
    product(FULL, transposed(x), T, dbase, added=dbase)


@piece
def read_rows(w: Work, q: Matrix, kT: Matrix, r: Matrix, W: Matrix, S: Matrix, A: Matrix, out: Matrix):
    """out, of the weights that each query reads."""
    product(FULL, q, kT, w.P)
    hadamard_to(rows(w.masks, w.mask_row, w.n), w.P)
    product(LEFT_LOWER, w.P, r, out)
    add_base(w, q, W, w.mask_row, 0, out)
    if w.momentum:
        add_base(w, q, S, w.mask_row, 1, out)
    if w.gain:
        add_base(w, q, A, w.mask_row, w.B - 1, out)


@piece
def masked_back(w: Work, q: Matrix, k: Matrix, kT: Matrix, d: Matrix, r: Matrix, rT: Matrix, dq: Matrix, dk: Matrix,
                dr: Matrix):  # fmt: skip
    """Back through sum_j m_tj (q_t . k_j) r_j, d the gradient of out.   rT: memory"""
    transpose(r, rT)
    product(FULL, d, rT, w.G)
    product(FULL, q, kT, w.P)
    for i in range(w.n):
        g, p, mask, dmask = row(w.G, i), row(w.P, i), row(w.masks, w.mask_row + i), row(w.dmasks, w.mask_row + i)
        for j in range(len(g)):
            dmask[j] += g[j] * p[j]
            g[j] *= mask[j]
            p[j] *= mask[j]
    product(FULL, w.G, k, dq, added=dq)
    product(FULL, transposed(w.G), q, dk, added=dk)
    product(FULL, transposed(w.P), d, dr, added=dr)


@piece
def combined(w: Work, end: Whole, kT: Matrix, r: Matrix, R: Matrix, W: Matrix, S: Matrix, out: Matrix):
    """out = the weights (end 0) or the momentum (1) after the last token: sum_n c_n B_n + sum_j m_j k_j^T r_j.

    R: memory
    """
    c, mask = row(w.c, w.mask_row + w.N + end), row(w.masks, w.mask_row + w.N + end)
    scaled(r, mask, R)
    for i in range(len(out)):
        base, momentum, to = row(W, i), row(S, i), row(out, i)
        f = c[0]
        if w.momentum:
            g = c[1]
            for j in range(len(to)):
                to[j] = f * base[j] + g * momentum[j]  # out may be S
        else:
            for j in range(len(to)):
                to[j] = f * base[j]
    product(FULL, kT, R, out, added=out)


@piece
def end_rows_back(w: Work, end: Whole, d: Matrix, k: Matrix, r: Matrix, dk: Matrix, dr: Matrix, T: Matrix, R: Matrix,
                  back: Matrix):  # fmt: skip
    """Back through sum_j m_j k_j^T r_j of `combined`, d the gradient of out.   T, R, back: memory"""
    at = w.mask_row + w.N + end
    mask, dmask = row(w.masks, at), row(w.dmasks, at)
    product(FULL, k, d, T)
    for i in range(w.n):
        dmask[i] += dot(row(T, i), row(r, i), T.shape[1])
    scale_rows(T, mask)
    add(T, dr)
    scaled(r, mask, R)
    transpose(d, back)
    product(FULL, R, back, dk, added=dk)


@piece
def end_base_back(w: Work, end: Whole, n: Whole, d: Matrix, base: Matrix, dbase: Matrix):
    """Back through c_n B_n of `combined`."""
    at = w.mask_row + w.N + end
    row(w.dc, at)[n] += number(d, overlap(d, base))
    factor = row(w.c, at)[n]
    for i in range(len(dbase)):
        own, to = row(d, i), row(dbase, i)
        for j in range(len(to)):
            to[j] += factor * own[j]
