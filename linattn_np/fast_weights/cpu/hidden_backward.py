"""The transpose of the first layer (hidden.py), beside that of the last one (backward.py).

du = ds * gelu'(y),   dr += du A,   dA += du^T r,   dy = ds * u * gelu''(y) + dh * gelu'(y),   dx += dy A1^T
"""

from __future__ import annotations

from ...ops.cpu.loops import over
from ...ops.cpu.products import FULL, product, transpose
from ...ops.cpu.rows import add, clear
from ...runtime.pieces.piece import Matrix, Whole, piece
from ...runtime.pieces.views import columns, row, transposed
from .ends import close_back
from .hidden import curve, slopes
from .layer import base_back, combined, end_base_back, end_rows_back, masked_back
from .memory import copy
from .workspace import Work


@piece
def open_hidden(w: Work):
    """Back through the end of a mini-batch."""
    if w.gain:
        combined(w, 0, w.xT, w.s, w.R1, w.W1, w.S1, w.Y1)
    close_back(w, w.Y1, w.A1, w.dW1, w.dA1)


@piece
def begin_hidden(w: Work):
    """Gradients of a tile, before anything is added to them."""
    clear(w.ds)
    clear(w.dx)
    clear(w.nW1)
    clear(w.nS1)
    copy(w.dA1, w.nA1)


@piece
def end_hidden_back(w: Work, end: Whole, d: Matrix):
    """Back through the last weights (end 0) or momentum (1), of the gradient d."""
    end_rows_back(w, end, d, w.x, w.s, w.dx, w.ds, w.T1, w.R1, w.back1)
    end_base_back(w, end, 0, d, w.W1, w.nW1)
    if w.momentum:
        end_base_back(w, end, 1, d, w.S1, w.nS1)


@piece
def hidden_queries_back(w: Work):
    """Back through the queries, from dq: the gradient of the last layer's."""
    slopes(w.yq, w.dq, w.T1)
    masked_back(w, w.xq, w.x, w.xT, w.T1, w.s, w.sT, w.dxq, w.dx, w.ds)
    base_back(w, w.xq, w.T1, w.dxq, w.W1, w.mask_row, 0, w.nW1, w.R1, w.back1)
    if w.momentum:
        base_back(w, w.xq, w.T1, w.dxq, w.S1, w.mask_row, 1, w.nS1, w.R1, w.back1)
    if w.gain:
        base_back(w, w.xq, w.T1, w.dxq, w.A1, w.mask_row, w.B - 1, w.nA1, w.R1, w.back1)


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
