"""Raw projections as the kernels load them: rows divided by their length, strengths and log decays by a formula.

    y_t = x_t / sqrt(|x_t|^2 + root^2), 0 of 0        beta_t = strongest / (1 + e^{-b_t})
    g_t = -e^{A_log} softplus(a_t),  or  lower_bound / (1 + e^{-e^{A_log} a_t}),      a_t = raw_t + bias

Backward, kernels compute gates again. loops.py computes rows and strengths ahead of them, and all transposes behind
them (preprocess.py).
"""

from __future__ import annotations

from ...ops.cpu.numbers import exp, number, softplus
from ...ops.cpu.rows import clear, normalise_rows
from ...ops.cpu.storage import load, load_column
from ...runtime.pieces.piece import Matrix, Stored, Vector, Whole, piece
from ...runtime.pieces.views import columns, row
from .workspace import Work


@piece
def load_rows(w: Work, x: Stored, head: Whole, out: Matrix):
    """q or k of a head, of the tokens from t on."""
    load(x, (w.BATCH, head, w.t), (0, w.K), out)
    if w.normalised:
        normalise_rows(columns(out, 0, w.K), w.root)


@piece(of="delta")
def load_strengths(w: Work):
    """beta of the tokens from t on."""
    load_column(w.in_beta, (w.BATCH, w.HEAD, w.t), w.beta)
    if w.before_sigmoid:
        for i in range(len(w.beta)):
            w.beta[i] = w.strongest / (number(w.beta, 1) + exp(-w.beta[i]))


@piece(of="raw_gate")
def load_gate(w: Work):
    """bias and e^{A_log} of the task's head; without them 0 and 1."""
    place = (0, w.HEAD, 0)
    if w.has_bias and w.vector:
        load(w.in_bias, place, (0, w.K), w.bias)
    elif w.has_bias:
        load_column(w.in_bias, place, row(columns(w.bias, 0, 1), 0))
    else:
        clear(w.bias)
    w.rate[0] = 1
    if w.has_rate:
        load_column(w.in_A_log, place, w.rate)
        w.rate[0] = exp(w.rate[0])


@piece(of="raw_gate")
def log_decays(w: Work, raw: Vector, bias: Vector):
    """raw <- log decays of one token's channels; a bias of one number is added to all tokens of raw."""
    rate, one, bound = w.rate[0], number(raw, 1), number(raw, w.lower_bound)
    for j in range(len(raw)):
        a = raw[j] + bias[j if len(bias) > 1 else 0]
        if w.bounded:
            raw[j] = bound / (one + exp(-rate * a))
        else:
            raw[j] = -rate * softplus(a)


@piece
def load_scalar_decays(w: Work, out: Vector):
    """Log decays of the tokens from t on."""
    load_column(w.in_g, (w.BATCH, w.HEAD, w.t), out)
    if w.raw_gate:
        log_decays(w, out, row(columns(w.bias, 0, 1), 0))


@piece
def load_vector_decays(w: Work, out: Matrix):
    """Log decays of K channels of the tokens from t on."""
    load(w.in_g, (w.BATCH, w.HEAD, w.t), (0, w.K), out)
    if w.raw_gate:
        for i in range(len(out)):
            log_decays(w, row(out, i), row(w.bias, 0))
