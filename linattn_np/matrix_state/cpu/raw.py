"""Rows as the kernels load them: divided by their length, rotated, weighed; strengths and log decays by a formula.

    y_t = x_t / sqrt(|x_t|^2 + root^2), 0 of 0        beta_t = strongest / (1 + e^{-b_t})
    g_t = -e^{A_log} softplus(a_t),  or  lower_bound / (1 + e^{-e^{A_log} a_t}),      a_t = raw_t + bias

Backward, kernels compute gates, rotated rows and weights again, and have the transposes of the last two. loops.py
computes unit rows and strengths ahead of them, and all other transposes behind them (preprocess.py).
"""

from __future__ import annotations

from ...ops.cpu.numbers import exp, number, softplus
from ...ops.cpu.rows import add_dots, add_outer, clear, fill, normalise_rows, scale_rows, times
from ...ops.cpu.rowwise import rotate_pairs, rotate_pairs_vjp
from ...ops.cpu.storage import load, load_column, save
from ...ops.cpu.trapezoid import add as add_scaled
from ...runtime.pieces.piece import Matrix, Stored, Vector, Whole, piece
from ...runtime.pieces.tiles import copy_row, dot
from ...runtime.pieces.views import FLOAT32, FLOAT64, columns, field_of, row, row_part, rows, tokens_of
from ...runtime.pieces.workspace import CHANNEL, STORAGE
from .workspace import Work


@piece
def load_rows(w: Work, x: Stored, head: Whole, out: Matrix):
    """q or k of a head, of the tokens from t on."""
    if w.rotated:
        load_rotated(w, x, head, out)
    else:
        load(x, (w.BATCH, head, w.t), (0, w.K), out)
        if w.normalised:
            normalise_rows(columns(out, 0, w.K), w.root)


# rotations: q_t <- q_t R_t, k_t <- k_t R_t; cosines, then sines, are rows of the dtype of the computation


@piece(of="rotated")
def load_rotated(w: Work, x: Stored, head: Whole, out: Matrix):
    """Rows that are rotated by their angles, from where they are if they need no conversion."""
    at, n, unit = (w.BATCH, head, w.t), 2 * w.pairs, out.itemsize
    in_place = field_of(x, STORAGE) == (FLOAT32 if unit == 4 else FLOAT64) and field_of(x, CHANNEL) == unit
    if not in_place or w.normalised:
        load(x, at, (0, w.K), out)
        if w.normalised:
            normalise_rows(columns(out, 0, w.K), w.root)
        in_place = False
    A, rotation = (
        tokens_of(x, w.scale, at, len(out), (0, w.K)) if in_place else out,
        tokens_of(w.in_rotation, w.scale, (w.BATCH, w.HEAD, w.t), len(out), (0, n)),
    )
    for i in range(len(out)):
        y, to, both = row(A, i), row(out, i), row(rotation, i)
        rotate_pairs(y, rows(both, 0, w.pairs), rows(both, w.pairs, w.pairs), False, to)
        if in_place:
            copy_row(rows(y, n, w.K - n), rows(to, n, len(to) - n), w.K - n)


@piece(of="rotated adjoint")
def rotate_vjp(w: Work, x: Matrix, dx: Matrix, other: Matrix):
    """dangle_p += x_2p dx_2p+1 - x_2p+1 dx_2p of the rotated rows x;  dx <- dx + own_shares other, rotated back.

    q_i k_i^T, which own_i weighs, has no angle: its parts of dangle would cancel, so they are added behind it.
    """
    n, owns = 2 * w.pairs, w.weighted and w.has_queries
    rotation = tokens_of(w.in_rotation, w.scale, (w.BATCH, w.HEAD, w.t), len(x), (0, n))
    more = columns(other, 0, n if owns else 0)
    for i in range(len(x)):
        both, f = row(rotation, i), w.own_shares[i] if owns else number(x, 0)
        c, s = rows(both, 0, w.pairs), rows(both, w.pairs, w.pairs)
        rotate_pairs_vjp(row(x, i), row(dx, i), row(more, i), f, c, s, row(w.dangle, i))


# weights of what later queries read of a token, and of what its own query reads: factors of the tables of the decay


@piece(of="weighted")
def load_weights(w: Work):
    """weight and own of the tokens from t on."""
    place = (w.BATCH, w.HEAD, w.t)
    load_column(w.in_weight, place, w.weights)
    load_column(w.in_own, place, w.owns)


@piece(of="weighted chunk")
def weigh_end(w: Work):
    """left_j = weight_j e^{s(j, end)}"""
    times(1.0, w.end, w.weights, w.left)


@piece(of="weighted chunk")
def weigh_gram(w: Work, P: Matrix):
    """P_ij <- scale P_ij E_ij weight_j for j < i, scale own_i P_ii, 0 beyond.

    The weight of the last token, which no query of the chunk reads, may come from the next chunk, a NaN too.
    """
    weights, none = w.weights, number(P, 0)
    for i in range(len(P)):
        p, e, f = row(P, i), row(w.E, i), w.scales[i]
        own = w.owns[i] * (f * p[i])
        for j in range(len(p)):
            p[j] = weights[j] * (f * (p[j] * e[j])) if j < i else none
        p[i] = own


@piece(of="weighted adjoint")
def weigh_end_vjp(w: Work):
    """Of dy, the gradient of keys before their factors: dweight_j = end_j k_j . dy_j, writers_j = left_j k_j . dy_j."""
    fill(w.dweights, 0.0)
    add_dots(w.k, w.dk, False, 1.0, w.dweights)
    for j in range(w.c):
        w.writers[j] += w.left[j] * w.dweights[j]
        w.dweights[j] *= w.end[j]


@piece(of="weighted adjoint")
def weigh_gram_vjp(w: Work):
    """weigh_gram of P, and of x_ij = dout_i . v_j = dP_ij, with s_ij = scale P_ij E_ij (s_ii = scale P_ii):

    dweight_j += s_ij x_ij,  crossed_ij += weight_j s_ij x_ij,  dP_ij <- scale x_ij E_ij weight_j for j < i
    down_i += s_ii x_ii,  own_shares_i = scale own_i x_ii,  dP_ii <- 0
    """
    weights, dweights, none = w.weights, w.dweights, number(w.P, 0)
    for i in range(w.c):
        p, d, e, to, f = row(w.P, i), row(w.dP, i), row(w.E, i), row(w.crossed, i), w.scales[i]
        along, read, own = f * p[i], d[i], w.owns[i]
        for j in range(w.c):
            x, s = d[j], f * (p[j] * e[j])
            term, share = (x * s if j < i else none), weights[j]
            dweights[j] += term
            to[j] += share * term if j < i else none
            p[j] = share * s if j < i else none
            d[j] = share * (f * (x * e[j])) if j < i else none
        w.downs[i] += along * read
        w.own_shares[i] = f * own * read
        p[i] = own * along


@piece(of="weighted adjoint")
def add_own_vjp(w: Work, other: Matrix, dx: Matrix):
    """dq_i += own_shares_i k_i, or dk_i += own_shares_i q_i, in the channels that do not rotate."""
    n = 2 * w.pairs
    for i in range(len(dx) if w.has_queries else 0):
        add_scaled(row_part(other, i, n, w.K - n), w.own_shares[i], row_part(dx, i, n, w.K - n))


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
