"""Raw projections as the kernels load them: rows divided by their length, strengths before their sigmoid.

    y_t = x_t / sqrt(|x_t|^2 + root^2), 0 of 0        beta_t = strongest / (1 + e^{-b_t})

Backward, loops.py computes both ahead of its kernels, and their transposes behind them (preprocess.py).
"""

from __future__ import annotations

from ...ops.cpu.numbers import exp, number
from ...ops.cpu.rows import unit_rows
from ...ops.cpu.storage import load, load_column
from ...runtime.pieces.piece import Matrix, Stored, Whole, piece
from ...runtime.pieces.views import columns
from .workspace import Work


@piece
def load_rows(w: Work, x: Stored, head: Whole, out: Matrix):
    """q or k of a head, of the tokens from t on."""
    load(x, (w.BATCH, head, w.t), (0, w.K), out)
    if w.normalised:
        unit_rows(columns(out, 0, w.K), columns(out, 0, w.K), w.root)


@piece(of="delta")
def load_strengths(w: Work):
    """beta of the tokens from t on."""
    load_column(w.in_beta, (w.BATCH, w.HEAD, w.t), w.beta)
    if w.before_sigmoid:
        for i in range(len(w.beta)):
            w.beta[i] = w.strongest / (number(w.beta, 1) + exp(-w.beta[i]))
