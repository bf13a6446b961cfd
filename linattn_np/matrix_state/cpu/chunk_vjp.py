"""The adjoint of a chunk: chunk.py's equations from the last to the first, dS the gradient of the state after it.

    S' = carry S + K^T diag(end) U           dU = diag(end) K dS,  dK = diag(end) U dS^T,  dS <- carry dS
    out = scale diag(start) Q S + P U        dQ = scale diag(start) dout S^T + rows(dP, K),  dP = dout U^T
                                             dS += Q^T diag(scale start) dout,  dU += P^T dout,  dK += columns(dP, Q)
    (1 + M) U = diag(beta) (V - ..R S)       dZ = (1 + M)^-T dU,  dV = diag(beta) dZ,  dM = -dZ U^T,  M = diag(beta) A
                                             dR = -diag(beta start) dZ S^T + rows(dM, K),  dS -= ..

Decay on the value axis: with f_i = e^{gv(start, i)}, l_j = e^{gv(j, end)} and the cotangent c of the outputs

    out_i = f_i (.) q^_i S + sum_j P_ij e^{gv(j, i)} (.) v_j
    S' = carry(S) diag(f_end) + sum_j k^_j^T (l_j (.) v_j)

so P is to (c, v) what the cotangent of a gram is to (q, k): rows(P, v) is the output, columns(P, c) the gradient of v,
and gram(c, v) that of P.
"""

from __future__ import annotations

from ...ops.cpu.products import FULL, LEFT_UPPER, OUT_LOWER, product, transpose
from ...ops.cpu.rows import (
    add,
    add_dots,
    add_hadamard,
    add_outer,
    clear,
    fill,
    hadamard,
    hadamard_to,
    overlap,
    scale_columns,
    scale_rows,
    scaled,
)
from ...ops.cpu.storage import load, save, save_column, stream
from ...runtime.pieces.piece import Matrix, Number, Truth, Vector, Whole, piece
from ...runtime.pieces.views import as_row, row, transposed
from .averages import averages_vjp, read_z_vjp
from .chunk import bonus, bonus_vjp, load_queries, reach, solve_system
from .decay import block_gram, block_gram_vjp, gate_vjp, gram, gram_vjp, plain_gram
from .maps import features_vjp
from .raw import add_own_vjp, rotate_vjp, weigh_end_vjp, weigh_gram_vjp
from .workspace import EARLY, STRICT, Work


@piece
def chunk_vjp(w: Work):
    """Gradients of the chunk's inputs, and dS of the state before it."""
    place = (w.BATCH, w.HEAD, w.t)
    if w.rotated:
        clear(w.dangle)
    if w.weighted:
        fill(w.downs, 0.0)
    write_vjp(w)
    transpose(w.S, w.ST)
    for j in range(w.HEAD * w.queries, (w.HEAD + 1) * w.queries if w.has_queries else 0):
        read_vjp(w, j)
    if w.delta:
        delta_vjp(w)
    elif w.free:
        free_vjp(w)
    else:
        stream(w.dU, w.out_dv, place, (0, w.V))
    if w.map:
        features_vjp(w, False, w.HEAD)
    else:
        if w.rotated:
            rotate_vjp(w, w.k, w.dk, w.q)
            save(w.dangle, w.out_dangle, place, (0, w.pairs))
        if w.weighted:
            add_own_vjp(w, w.q, w.dk)
        stream(w.dk, w.out_dk, place, (0, w.K))
    if w.weighted:
        save_column(w.dweights, w.out_dweight, place)
        save_column(w.downs, w.out_down, place)
    gate_vjp(w)


@piece
def write_vjp(w: Work):
    """dU, dk (FREE: dY, db) and the gates' terms from dS, which is then carried to the state before the chunk."""
    if w.scalar:
        clear(w.crossed_before)
        fill(w.readers_before, 0.0)
        fill(w.writers, 0.0)
    elif w.vector:
        clear(w.crossed_k)
        clear(w.readers_k_before)
        clear(w.writers_k)
    if w.value_decay:
        clear(w.crossed_v)
        clear(w.readers_v_before)
        clear(w.writers_v)
    written_vjp(w, w.k, w.U, w.dU, w.dk)
    if w.free:
        written_vjp(w, w.b, w.Y, w.dY, w.db)
    if w.averaged:
        add_outer(w.ones, w.dz, w.dk)
    if w.value_decay:
        scale_columns(w.dS, w.carry_v, w.dS)
    if w.scalar:
        w.totals[0] = w.start[w.c] * overlap(w.S, w.dS)
    elif w.vector:
        fill(w.totals, 0.0)
        add_dots(w.S, w.dS, False, 1.0, w.totals)
        hadamard_to(as_row(w.carry), as_row(w.totals))
    if w.decay:
        scale_rows(w.dS, w.carry)
    if w.value_decay:
        column_overlap(w.S, w.dS, w.totals_v)


@piece(of="value_decay")
def column_overlap(S: Matrix, dS: Matrix, out: Vector):
    """out_v = sum_d S_dv dS_dv"""
    fill(out, 0.0)
    for d in range(len(S)):
        s, ds = row(S, d), row(dS, d)
        for v in range(len(s)):
            out[v] += s[v] * ds[v]


@piece
def written_vjp(w: Work, y: Matrix, u: Matrix, du: Matrix, dy: Matrix):
    """The adjoint of S' = ... + (y (.) e^{s(j, end)})^T u."""
    values = u
    if w.value_decay:
        hadamard(u, w.last_v, w.ended)
        values = w.ended
    transpose(values, w.UT)
    product(FULL, w.dS, w.UT, w.dyT)
    transpose(w.dyT, dy)
    if w.vector:
        hadamard(y, w.last, w.decayed)
        product(FULL, w.decayed, w.dS, du)
        hadamard_to(w.last, dy)
        add_hadamard(y, dy, w.writers_k)
    else:
        product(FULL, y, w.dS, du, w.left)
        if w.weighted:
            weigh_end_vjp(w)
        if w.scalar:
            scale_rows(dy, w.left)
        if w.scalar and not w.weighted:
            add_dots(y, dy, False, 1.0, w.writers)
    if w.value_decay:
        hadamard_to(w.last_v, du)
        add_hadamard(u, du, w.writers_v)


@piece
def read_rows(w: Work, x: Matrix, early: Whole, by: Vector, sign: Number):
    """decayed_i = sign by_i x_i e^{s(start, i)}, and factor as `reach`."""
    reach(w, x, early, by, sign)
    if w.vector:
        scale_rows(w.decayed, w.factor)
    else:
        scaled(x, w.factor, w.decayed)


@piece
def reader_vjp(w: Work, x: Matrix, cotangent: Matrix, early: Whole, by: Vector, sign: Number, dx: Matrix, raw: Truth):
    """dx = sign by_i e^{s(start, i)} (c S^T), the gates' terms, dS += readers^T c; raw: back = c S^T."""
    read_rows(w, x, early, by, sign)
    if raw:
        product(FULL, cotangent, w.ST, w.back)
        scaled(w.back, w.factor, dx)
    else:
        product(FULL, cotangent, w.ST, dx, w.factor)
    if w.vector:
        hadamard_to(w.first_before if early else w.first, dx)
        add_hadamard(x, dx, w.readers_k_before if early else w.readers_k)
    elif w.scalar:
        add_dots(x, dx, False, 1.0, w.readers_before if early else w.readers)
    product(FULL, transposed(w.decayed), cotangent, w.dS, added=w.dS)


@piece
def read_vjp(w: Work, j: Whole):
    """The adjoint of the outputs of query head j: dq, and its terms of dU, dk, dY, db and dS."""
    early, place = w.query_reads, (w.BATCH, j, w.t)
    load_queries(w, j)
    load(w.in_dout, place, (0, w.V), w.dout)
    if w.averaged:
        averages_vjp(w, j)
    dout = w.dout
    if w.value_decay:
        hadamard(w.dout, w.first_v_before if early else w.first_v, w.decayed_dout)
        dout = w.decayed_dout
    reader_vjp(w, w.q, dout, early, w.scales, 1.0, w.dq, False)
    if w.averaged:
        read_z_vjp(w)
    if w.value_decay:
        product(FULL, w.decayed, w.S, w.read_v)
        add_hadamard(w.read_v, dout, w.readers_v_before if early else w.readers_v)
    read_written_vjp(w, w.k, w.kT, w.U, w.dU, w.dk)
    if w.free:
        read_written_vjp(w, w.b, w.bT, w.Y, w.dY, w.db)
    if w.map:
        features_vjp(w, True, j)
    else:
        if w.rotated:
            rotate_vjp(w, w.q, w.dq, w.k)
        if w.weighted:
            add_own_vjp(w, w.k, w.dq)
        stream(w.dq, w.out_dq, place, (0, w.K))


@piece
def read_written_vjp(w: Work, y: Matrix, yT: Matrix, u: Matrix, du: Matrix, dy: Matrix):
    """The adjoint of out = ... + gram(q, y) u."""
    reads = EARLY | STRICT if w.query_reads else 0
    if w.weighted:
        plain_gram(w, w.q, y, yT, reads, w.P)
    else:
        gram(w, w.q, y, yT, reads, w.scales, w.P)
    if w.value_decay:
        block_gram(w.dout, u, w.W_v, w.query_reads, w.dP, w.near_v, w.far_v, w.farT_v)
        block_gram_vjp((w.W_v, w.crossed_v, w.scratch_v), w.P, w.dout, u, w.query_reads, w.out_v, du)
    else:
        if w.free:
            transpose(u, w.UT)
        product(OUT_LOWER, w.dout, w.UT, w.dP)
        if w.weighted:
            weigh_gram_vjp(w)
        if w.averaged:
            add_outer(w.weights, w.ones, w.dP)
        if w.bonus:
            bonus(w)
            bonus_vjp(w)
        product(LEFT_UPPER, transposed(w.P), w.dout, du, added=du)
    gram_vjp(w, reads, w.scales, w.P, w.q, y, w.dq, dy)


@piece(of="delta")
def delta_vjp(w: Work):
    """dZ = (1 + M)^-T dU, M = diag(beta) A; dv = beta dZ, dM = -dZ U^T, and the adjoint of the reads of r."""
    place, early = (w.BATCH, w.HEAD, w.t), w.erase_reads
    scaled(w.A, w.beta, w.M)
    solve_system(w, w.M, w.dU, True)
    stream(w.dU, w.out_dv, place, (0, w.V), w.beta)
    product(OUT_LOWER, w.dU, w.UT, w.dP, w.minus)
    reader_vjp(w, w.r, w.dU, early, w.beta, -1.0, w.dr, True)
    fill(w.dbeta, 0.0)  # dbeta_i = dZ_i . (v_i - r_i S - sum_j A_ij U_j)
    add_dots(w.dU, w.v, False, 1.0, w.dbeta)
    add_dots(w.A, w.dP, True, 1.0, w.dbeta)
    read_rows(w, w.r, early, w.ones, 1.0)
    add_dots(w.decayed, w.back, False, -1.0, w.dbeta)
    save_column(w.dbeta, w.out_dbeta, place)
    gram_vjp(w, early | STRICT, w.beta, w.M, w.r, w.k, w.dr, w.dk)
    if w.separate_erase_key:
        stream(w.dr, w.out_dr, place, (0, w.K))
    else:
        add(w.dr, w.dk)


@piece(of="free")
def free_vjp(w: Work):
    """dZ = (1 + A)^-T dY, A = -gram(a, b); dN = dZ v^T of N = gram(a, k), dA = -dZ Y^T, and the adjoint of a S."""
    place, reads = (w.BATCH, w.HEAD, w.t), EARLY | STRICT
    solve_system(w, w.A, w.dY, True)
    gram(w, w.r, w.k, w.kT, reads, w.ones, w.P)
    product(LEFT_UPPER, transposed(w.P), w.dY, w.dU, added=w.dU)
    stream(w.dU, w.out_dv, place, (0, w.V))
    reader_vjp(w, w.r, w.dY, EARLY, w.ones, 1.0, w.dr, False)
    transpose(w.v, w.UT)
    product(OUT_LOWER, w.dY, w.UT, w.dP)
    gram_vjp(w, reads, w.ones, w.P, w.r, w.k, w.dr, w.dk)
    transpose(w.Y, w.UT)
    product(OUT_LOWER, w.dY, w.UT, w.dP, w.minus)
    gram_vjp(w, reads, w.minus, w.A, w.r, w.b, w.dr, w.db)
    stream(w.dr, w.out_dr, place, (0, w.K))
    stream(w.db, w.out_db, place, (0, w.K))
