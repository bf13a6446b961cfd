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
from ...ops.cpu.products import FULL, product, transpose
from ...runtime.pieces.piece import Matrix, piece
from ...runtime.pieces.views import columns, row
from .ends import close
from .layer import combined, read_rows
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
def hidden_queries(w: Work):
    """yq and q of the queries, of the weights that they read."""
    read_rows(w, w.xq, w.xT, w.s, w.W1, w.S1, w.A1, w.yq)
    activate(w, w.yq, w.q)


@piece
def end_hidden(w: Work):
    """W1, S1 and A1 after the tile."""
    combined(w, 0, w.xT, w.s, w.R1, w.W1, w.S1, w.Y1)
    if w.momentum:
        combined(w, 1, w.xT, w.s, w.R1, w.W1, w.S1, w.S1)
    close(w, w.Y1, w.W1, w.A1)
