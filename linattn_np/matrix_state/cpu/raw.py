"""Rows as the kernels load them: divided by their length, rotated, weighed; strengths and log decays by a formula.

    y_t = x_t / sqrt(|x_t|^2 + root^2), 0 of 0        beta_t = strongest / (1 + e^{-b_t})
    g_t = -e^{A_log} softplus(a_t),  or  lower_bound / (1 + e^{-e^{A_log} a_t}),      a_t = raw_t + bias

Backward, kernels compute gates, rotated rows and weights again, and have the transposes of the last two. loops.py
computes unit rows and strengths ahead of them, and all other transposes behind them (preprocess.py).
"""

from __future__ import annotations

from ...ops.cpu.numbers import exp, number, softplus
from ...ops.cpu.rows import add_outer, clear, fill, normalise_rows, scale_rows
from ...ops.cpu.rowwise import rotate_pairs
from ...ops.cpu.storage import load, load_column, save, save_column
from ...ops.cpu.trapezoid import crossed
from ...runtime.pieces.piece import Matrix, Stored, Truth, Vector, Whole, piece
from ...runtime.pieces.tiles import dot
from ...runtime.pieces.views import columns, row, rows
from .workspace import Work


@piece
def load_rows(w: Work, x: Stored, head: Whole, out: Matrix):
    """q or k of a head, of the tokens from t on."""
    load(x, (w.BATCH, head, w.t), (0, w.K), out)
    if w.normalised:
        normalise_rows(columns(out, 0, w.K), w.root)


# rotations: q_t <- q_t R_t, k_t <- k_t R_t


@piece(of="rotated")
def load_rotations(w: Work):
    """Cosines and sines of the tokens from t on."""
    load(w.in_rotation, (w.BATCH, w.HEAD, w.t), (0, w.pairs), w.cosines)
    load(w.in_rotation, (w.BATCH, w.HEAD, w.t), (w.pairs, w.pairs), w.sines)


@piece(of="rotated")
def rotate_rows(w: Work, x: Matrix, back: Truth):
    """Rows of tokens, rotated by their angles or back."""
    for i in range(len(x)):
        rotate_pairs(row(x, i), row(w.cosines, i), row(w.sines, i), back, row(x, i))


@piece(of="rotated adjoint")
def angles_vjp(w: Work, y: Matrix, dy: Matrix):
    """dangle_p += y_2p dy_2p+1 - y_2p+1 dy_2p of the rotated rows y."""
    for i in range(len(y)):
        crossed(row(y, i), row(dy, i), row(w.dangle, i))


# weights: u_t = weight_t v_t is written, but a token's own query reads own_t v_t


@piece(of="weighted")
def load_weights(w: Work):
    """weight and own of the tokens from t on."""
    place = (w.BATCH, w.HEAD, w.t)
    load_column(w.in_weight, place, w.weights)
    load_column(w.in_own, place, w.owns)


@piece(of="weighted chunk")
def take_own(w: Work):
    """own_shares_i = own_i P_ii: the diagonal of P has factors of its own, and is 0 where the others are used."""
    for i in range(w.c):
        w.own_shares[i] = w.owns[i] * w.P[i, i]
        w.P[i, i] = 0


@piece(of="weighted adjoint")
def begin_weights_vjp(w: Work):
    clear(w.dv_own)
    clear(w.dk_own)
    fill(w.downs, 0.0)


@piece(of="weighted adjoint")
def take_own_vjp(w: Work):
    """From t_i = dout_i . v_i: down_i += P_ii t_i, dv_i += own_i P_ii dout_i; own_shares_i = scale own_i t_i."""
    for i in range(w.c):
        along, v, dout, dv = w.P[i, i], row(w.v, i), row(w.dout, i), row(w.dv_own, i)
        read, own = dot(dout, v, len(v)), w.owns[i]
        w.downs[i] += along * read
        for d in range(len(dv)):
            dv[d] += own * along * dout[d]
        w.own_shares[i] = w.scale * own * read
        w.P[i, i] = 0
        w.dP[i, i] = 0


@piece(of="weighted adjoint")
def add_own_vjp(w: Work):
    """dq_i += own_shares_i k_i, and dk apart: q_i k_i^T has no angle, and their parts of its gradient would cancel."""
    for i in range(w.c):
        f, q, k, dq, dk = w.own_shares[i], row(w.q, i), row(w.k, i), row(w.dq, i), row(w.dk_own, i)
        for d in range(len(dq)):
            dq[d] += f * k[d]
            dk[d] += f * q[d]


@piece(of="weighted adjoint")
def weights_vjp(w: Work):
    """dweight_i = dU_i . v_i;  dU <- dv = diag(weight) dU + dv_own"""
    place = (w.BATCH, w.HEAD, w.t)
    for i in range(w.c):
        du, v, more, f = row(w.dU, i), row(w.v, i), row(w.dv_own, i), w.weights[i]
        w.dweights[i] = dot(du, v, len(v))
        for d in range(len(du)):
            du[d] = f * du[d] + more[d]
    save_column(w.dweights, w.out_dweight, place)
    save_column(w.downs, w.out_down, place)


@piece(of="preceded chunk")
def add_past(w: Work):
    """S += past_k^T past_v"""
    load(w.in_past_k, (w.STATE, w.HEAD, 0), (0, w.K), w.past_k)
    load(w.in_past_v, (w.STATE, w.HEAD, 0), (w.COLUMN, w.V), w.past_v)
    add_outer(row(w.past_k, 0), row(w.past_v, 0), rows(w.S, 0, w.K))


@piece(of="preceded adjoint")
def past_vjp(w: Work):
    """dpast_k = past_v dS^T, dpast_v = past_k dS"""
    k, v, dk, dv = row(w.past_k, 0), row(w.past_v, 0), row(w.dpast_k, 0), row(w.dpast_v, 0)
    clear(w.dpast_v)
    for i in range(w.K):
        f, dS = k[i], row(w.dS, i)
        dk[i] = dot(v, dS, len(v))
        for d in range(len(dv)):
            dv[d] += f * dS[d]
    save(w.dpast_k, w.out_dpast_k, (w.STATE, w.HEAD, 0), (0, w.K))
    save(w.dpast_v, w.out_dpast_v, (w.STATE, w.HEAD, 0), (0, w.V))


@piece(of="weighted tokens")
def weigh_slab(w: Work):
    """Weights of a slab's keys, q k^T own of its queries, and e^g k of a row before the first token."""
    load_weights(w)
    for i in range(w.c if w.has_queries else 0):
        w.bonuses[i] = w.owns[i] * dot(row(w.query, i), row(w.keys, i), w.K)
    scale_rows(w.keys, w.weights)
    if w.preceded and w.t == w.FIRST and not w.EARLIER:
        load(w.in_past_k, (w.STATE, w.HEAD, 0), (0, w.K), rows(w.pushes, 0, 1))
        scale_rows(rows(w.pushes, 0, 1), w.factor)


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
