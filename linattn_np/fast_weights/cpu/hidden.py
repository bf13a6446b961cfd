"""The first layer of an MLP: y = x W1, whose rows gelu(y) are the keys of the last layer (forward.py).

With r the cotangents of the last layer's products, u = r A^T and s = u * gelu'(y) are those of the first one's.
"""

from __future__ import annotations

from typing import Any

from numba import njit

from ...ops.activations import CUBE, ROOT
from ...ops.cpu.activations import gelu_tanh_of, gelu_tanh_slope, tanh_share
from ...ops.cpu.loops import over
from ...ops.cpu.numbers import OPTIONS
from ...ops.cpu.products import FULL, LEFT_LOWER, product, transpose
from ...ops.cpu.rows import hadamard_to, scaled
from ...runtime.pieces.piece import Matrix, Whole, piece
from ...runtime.pieces.views import columns, row, rows
from .ends import close
from .memory import column_of
from .workspace import Work

value, slope = njit(**OPTIONS)(gelu_tanh_of), njit(**OPTIONS)(gelu_tanh_slope)


@njit(**OPTIONS)
def curve(x: Any, dy: Any, u: Any, *_: Any) -> Any:
    """gelu''(x) dy u, gelu'' = (1 - t^2) (a' + x a'' / 2 - x t a'^2), t = tanh a = 2 s - 1"""
    s = tanh_share(x)
    first = ROOT * (1.0 + 3.0 * CUBE * x * x)
    return dy * u * (4.0 * s * (1.0 - s)) * (first + x * (3.0 * ROOT * CUBE * x - (2.0 * s - 1.0) * first * first))


@piece
def activate(w: Work, y: Matrix, h: Matrix):
    """h = gelu(y), and 1 with a bias"""
    for i in range(w.n):
        x = row(y, i)
        over(value, x, x, x, 0, row(columns(h, 0, w.M), i))
        if w.biased:
            h[i, w.M] = 1


@piece
def slopes(y: Matrix, d: Matrix, out: Matrix):
    """out = d * gelu'(y), as wide as y"""
    for i in range(len(out)):
        x, dy = row(y, i), row(columns(d, 0, y.shape[1]), i)
        over(slope, x, dy, dy, 0, row(out, i))


@piece
def hidden_rows(w: Work):
    """y and k of the keys."""
    transpose(w.x, w.xT)
    product(FULL, w.x, w.A1, w.y)
    activate(w, w.y, w.k)


@piece
def hidden_gradient(w: Work):
    """u and s."""
    transpose(w.A, w.to_u)
    product(FULL, w.r, w.to_u, w.u)
    slopes(w.y, w.u, w.s)


@piece
def add_base1(w: Work, x: Matrix, base: Matrix, n: Whole, out: Matrix):
    """out += c_n x B_n"""
    column_of(w, w.mask_row, n)
    product(FULL, x, base, out, rows=w.column, added=out)


@piece
def hidden_queries(w: Work):
    """yq and q of the queries, of the weights that they read."""
    product(FULL, w.xq, w.xT, w.P)
    hadamard_to(rows(w.masks, w.mask_row, w.n), w.P)
    product(LEFT_LOWER, w.P, w.s, w.yq)
    add_base1(w, w.xq, w.W1, 0, w.yq)
    if w.momentum:
        add_base1(w, w.xq, w.S1, 1, w.yq)
    if w.gain:
        add_base1(w, w.xq, w.A1, w.B - 1, w.yq)
    activate(w, w.yq, w.q)


@piece
def combined1(w: Work, end: Whole, out: Matrix):
    """As forward.py:combined, of the first layer."""
    c, mask = row(w.c, w.mask_row + w.N + end), row(w.masks, w.mask_row + w.N + end)
    scaled(w.s, mask, w.R1)
    for i in range(w.X_D):
        base, momentum, to = row(w.W1, i), row(w.S1, i), row(out, i)
        f = c[0]
        if w.momentum:
            g = c[1]
            for j in range(len(to)):
                to[j] = f * base[j] + g * momentum[j]  # out may be S1
        else:
            for j in range(len(to)):
                to[j] = f * base[j]
    product(FULL, w.xT, w.R1, out, added=out)


@piece
def end_hidden(w: Work):
    """W1, S1 and A1 after the tile."""
    combined1(w, 0, w.Y1)
    if w.momentum:
        combined1(w, 1, w.S1)
    close(w, w.Y1, w.W1, w.A1)
