"""A chunk of c tokens, from the state S before it:

    DELTA  A_ij = r_i . k_j e^{s(j, i)}, j < i      (1 + diag(beta) A) U = diag(beta) (V - diag(e^{s(start, i)}) R S)
    FREE   A_ij = -a_i . b_j e^{s(j, i - 1)}        (1 + A) Y = diag(e^{s(start, i - 1)}) a S + gram(a, k) V,   U = V
    none   U = V

    P_ij = scale q_i . k_j e^{s(j, i)}, j <= i      out = scale diag(e^{s(start, i)}) Q S + P U  (+ gram(q, b) Y)
    S' = e^{s(start, end)} S + K^T diag(e^{s(j, end)}) U  (+ b^T diag(e^{s(j, end)}) Y)

With a vector decay the exponentials stand at the channels of Q, R and K instead of beside them.
"""

from __future__ import annotations

from ...ops.cpu.products import FULL, LEFT_LOWER, LEFT_UPPER, product, solve, solve_transposed, transpose
from ...ops.cpu.rows import add, add_weighted_rows, fill, hadamard, scale_columns, scaled, times
from ...ops.cpu.storage import load
from ...runtime.pieces.piece import Matrix, Number, Truth, Vector, Whole, piece
from ...runtime.pieces.tiles import dot
from ...runtime.pieces.views import address_of, as_row, field_of, point, row, transposed
from ...runtime.pieces.workspace import TOKEN
from .averages import find_averages
from .decay import decays, gram, pair_table, plain_gram, rest, weigh
from .maps import features
from .raw import load_gate, load_rows, load_strengths, load_weights
from .workspace import EARLY, STRICT, Q, U, V, Work


@piece
def once(w: Work):
    """Computed once for a range of tasks: constant vectors, and the tables of calls without a decay."""
    w.c, w.c1 = w.C, w.C + 1
    fill(w.scales, w.scale)
    fill(w.ones, 1.0)
    fill(w.minus, -1.0)
    fill(w.carry, 1.0)
    if w.map:
        load(w.in_numbers, (0, 0, 0), (0, len(w.map_numbers)), as_row(w.map_numbers))
    if not w.scalar:
        fill(w.factor, 0.0)
        pair_table(w.factor, w.sums, w.E, w.start, w.end)


@piece
def begin_task(w: Work, n: Whole):
    """Task n: a row of the table of tasks."""
    x = row(w.tasks, n)
    w.BATCH, w.FIRST, w.STOP, w.STATE, w.HEAD, w.COLUMN = x[0], x[1], x[2], x[3], x[4], x[5]
    w.V, w.EARLIER, w.LATER, w.FROM, w.TO, w.AT = x[6], x[7], x[8], x[9], x[10], x[11]
    w.V_lanes = -(-w.V // w.lane) * w.lane
    if w.bonus:
        load(w.in_u, (0, w.HEAD, 0), (0, w.K), w.u)
    if w.raw_gate:
        load_gate(w)


@piece
def begin_chunk(w: Work):
    """c tokens from t on."""
    w.c = min(w.C, w.STOP - w.t)
    w.c1 = w.c + 1


@piece
def load_tokens(w: Work):
    """k, v and the erase vectors of the chunk."""
    place = (w.BATCH, w.HEAD, w.t)
    if w.map:
        if not w.returning:
            features(w, False, w.HEAD)
    else:
        load_rows(w, w.in_k, w.HEAD, w.k)
    if w.direct_v:
        point(w, V, address_of(w.in_v, place, w.COLUMN), field_of(w.in_v, TOKEN))
        if not w.delta:
            point(w, U, address_of(w.in_v, place, w.COLUMN), field_of(w.in_v, TOKEN))
    else:
        load(w.in_v, place, (w.COLUMN, w.V), w.v)
    if w.weighted:
        load_weights(w)
    if not w.formed:
        transpose(w.k, w.kT)
    if w.separate_erase_key:
        load(w.in_r, place, (0, w.K), w.r)
    if w.delta:
        load_strengths(w)
        w.reflects = 0
        if w.compensates:
            for x in w.beta:
                if x > 1:
                    w.reflects = 1
    elif w.free:
        load(w.in_b, place, (0, w.K), w.b)
        transpose(w.b, w.bT)


@piece
def reach(w: Work, x: Matrix, early: Whole, by: Vector, sign: Number):
    """factor_i = sign e^{s(start, i)} by_i; vector decay: decayed_i = x_i (.) e^{s(start, i)}, factor_i = sign by_i."""
    times(sign, w.start if early else w.start_after, by, w.factor)
    if w.vector:
        hadamard(x, w.first_before if early else w.first, w.decayed)


@piece
def read_state(w: Work, x: Matrix, early: Whole, by: Vector, sign: Number, out: Matrix, added: Matrix = None,
               weights: Vector = None):  # fmt: skip
    """out_i = sign by_i (x_i e^{s(start, i)}) S + weights_i added_i"""
    reach(w, x, early, by, sign)
    product(FULL, w.decayed if w.vector else x, w.S, out, w.factor, added, weights)


@piece
def write_state(w: Work, y: Matrix, u: Matrix, S: Matrix, out: Matrix, weights: Vector = None):
    """out = diag(weights) S + sum_j (y_j e^{s(j, end)})^T u_j"""
    keys, values = y, u
    if w.vector:
        hadamard(y, w.last, w.decayed)
        keys = w.decayed
    elif w.scalar:
        scaled(u, w.left, w.inside)
        values = w.inside
    product(FULL, transposed(keys), values, out, added=S, weights=weights)


@piece
def system(w: Work):
    """A, and its float32 rounding error in rows with beta > 1.

    1 - beta |k|^2 < 0 reflects the stored value: a repeated key forgets nothing, and the rounding error of |k|^2 in a
    chunk would add up over all of its tokens.
    """
    if w.delta:
        early = w.erase_reads
        plain_gram(w, w.r, w.k, w.kT, early, w.A)
        if w.reflects:
            rest(w.r, w.k, w.A, w.beta, w.rest)
            weigh(w.rest, w.E_before if early else w.E, True, w.beta)
        weigh(w.A, w.E_before if early else w.E, True, w.ones)
        scaled(w.A, w.beta, w.M)
    elif w.free:
        gram(w, w.r, w.b, w.bT, EARLY | STRICT, w.minus, w.A)


@piece
def erase(w: Work):
    """U or Y, the values that the chunk writes, from the state before it."""
    if w.delta:
        read_state(w, w.r, w.erase_reads, w.beta, -1.0, w.U, w.v, w.beta)
        solve_system(w, w.M, w.U, False)
    else:
        read_state(w, w.r, EARLY, w.ones, 1.0, w.Y)
        gram(w, w.r, w.k, w.kT, EARLY | STRICT, w.ones, w.P)
        product(LEFT_LOWER, w.P, w.v, w.Y, added=w.Y)
        solve_system(w, w.A, w.Y, False)


@piece
def writes(w: Work):
    """The values that a chunk writes, from the state before it."""
    load_tokens(w)
    decays(w)
    if w.erase:
        system(w)
        erase(w)


@piece
def solve_system(w: Work, N: Matrix, X: Matrix, upper: Truth):
    """X <- (1 + N)^-1 X, or its transpose; and once more for the rest of N where that was computed."""
    if upper:
        solve_transposed(N, X)
    else:
        solve(N, X)
    if w.reflects:
        if upper:
            product(LEFT_UPPER, transposed(w.rest), X, w.correction, w.minus)
            solve_transposed(N, w.correction)
        else:
            product(LEFT_LOWER, w.rest, X, w.correction, w.minus)
            solve(N, w.correction)
        add(w.correction, X)


@piece
def write(w: Work, out: Matrix, z: Vector):
    """out = the state after the chunk, and z."""
    S, u = w.S, w.U
    if w.value_decay:
        scale_columns(S, w.carry_v, out)
        hadamard(u, w.last_v, w.ended)
        S, u = out, w.ended
    write_state(w, w.k, u, S, out, w.carry)
    if w.free:
        write_state(w, w.b, w.Y, out, out)
    if w.averaged:
        scaled(as_row(w.z), None, as_row(z))
        add_weighted_rows(None, w.k, 1.0, z)


@piece
def load_queries(w: Work, j: Whole):
    """q of head j."""
    if w.map:
        features(w, True, j)
    elif w.direct_q:
        point(w, Q, address_of(w.in_q, (w.BATCH, j, w.t), 0), field_of(w.in_q, TOKEN))
    else:
        load_rows(w, w.in_q, j, w.q)


@piece
def read(w: Work, j: Whole, out: Matrix):
    """out = the outputs of query head j, with the bonus on the diagonal."""
    reads = EARLY | STRICT if w.query_reads else 0
    load_queries(w, j)
    gram(w, w.q, w.k, w.kT, reads, w.scales, w.P)
    if w.bonus:
        bonus(w)
    product(LEFT_LOWER, w.P, w.U, w.inside)
    if w.averaged:
        find_averages(w, j)
    if w.free:
        gram(w, w.q, w.b, w.bT, reads, w.scales, w.P)
        product(LEFT_LOWER, w.P, w.Y, w.inside, added=w.inside)
    over = w.over if w.averaged else w.ones
    read_state(w, w.q, w.query_reads, over, w.scale, out, w.inside, over)


@piece(of="bonus")
def bonus(w: Work):
    """P_ii = scale sum_d q_id u_d k_id"""
    scale_columns(w.q, row(w.u, 0), w.decayed)
    for i in range(w.c):
        w.P[i, i] = w.scale * dot(row(w.decayed, i), row(w.k, i), w.K_lanes)


@piece(of="bonus")
def bonus_vjp(w: Work):
    """From s_i = scale dP_ii: dq += s u k, dk += s u q, du += s q k."""
    u, du = row(w.u, 0), row(w.du, 0)
    for i in range(w.c):
        s, q, k, dq, dk = w.scale * w.dP[i, i], row(w.q, i), row(w.k, i), row(w.dq, i), row(w.dk, i)
        for d in range(len(u)):
            dq[d] += s * u[d] * k[d]
            dk[d] += s * u[d] * q[d]
            du[d] += s * q[d] * k[d]
