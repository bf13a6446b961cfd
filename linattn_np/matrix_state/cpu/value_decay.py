"""Decay on the value axis in the adjoint: the functions of decay.py, with values and cotangents as vectors.

With A_ij = scale gram(q, k)_ij, f_i = e^{gv(start, i)}, l_j = e^{gv(j, end)} and the cotangent c of the outputs,

    out_i = f_i (.) q^_i S + sum_j A_ij e^{gv(j, i)} (.) v_j
    S' = carry(S) diag(f_end) + sum_j k^_j^T (l_j (.) v_j)

so A is to (c, v) what the cotangent of a gram is to (q, k): rows(A, v) is the output, columns(A, c) the gradient of v,
and gram(c, v) that of A.
"""

from __future__ import annotations

from ...ops.cpu.products import FULL, product
from ...ops.cpu.rows import add_hadamard, clear, hadamard, hadamard_to
from ...ops.cpu.storage import load, save
from ...runtime.pieces.piece import Matrix, Whole, piece
from ...runtime.pieces.views import row
from .decay import block_gram, tables_of
from .decay_vjp import block_gram_vjp, channel_crossings
from .workspace import Work


@piece(of="value_decay")
def value_tables(w: Work):
    """e^{gv} from the chunk's start and to its end."""
    load(w.in_gv, (w.BATCH, w.HEAD, w.t), (0, w.V), w.W_v)
    tables_of(w.W_v, w.first_v, w.first_v_before, w.last_v, w.carry_v)


@piece(of="value_decay")
def value_ended(w: Work, u: Matrix):
    """ended = l (.) u"""
    hadamard(u, w.last_v, w.ended)


@piece(of="value_decay")
def value_carried(w: Work, S: Matrix, out: Matrix):
    """out = S diag(f_end)"""
    f = w.carry_v
    for d in range(len(S)):
        a, to = row(S, d), row(out, d)
        for v in range(len(to)):
            to[v] = a[v] * f[v]


@piece(of="value_decay")
def begin_value_vjp(w: Work):
    """Nothing has crossed a gate."""
    clear(w.crossed_v)
    clear(w.readers_v_before)
    clear(w.writers_v)


@piece(of="value_decay")
def value_ended_vjp(w: Work, u: Matrix, du: Matrix):
    """du <- l (.) du, what the gates get."""
    hadamard_to(w.last_v, du)
    add_hadamard(u, du, w.writers_v)


@piece(of="value_decay")
def value_decayed(w: Work):
    """decayed_dout = f (.) c"""
    hadamard(w.dout, w.first_v_before if w.query_reads else w.first_v, w.decayed_dout)


@piece(of="value_decay")
def value_read_vjp(w: Work):
    """What the gates get of f (.) q^ S: decayed is q^, scaled."""
    product(FULL, w.decayed, w.S, w.read_v)
    add_hadamard(w.read_v, w.decayed_dout, w.readers_v_before if w.query_reads else w.readers_v)


@piece(of="value_decay")
def value_inside_vjp(w: Work, early: Whole, u: Matrix, du: Matrix):
    """dP = gram(c, u), du += columns(P, c) and what the gates get."""
    block_gram(w.dout, u, w.W_v, early, w.dP, w.near_v, w.far_v, w.farT_v)
    block_gram_vjp((w.W_v, w.crossed_v, w.scratch_v), w.P, w.dout, u, early, w.out_v, du)


@piece(of="value_decay")
def value_carried_vjp(w: Work):
    """What the gates get of the carried state: S (.) dS down its columns, dS having faded on both axes."""
    for v in range(w.V_lanes):
        w.totals_v[v] = 0
    for d in range(w.K):
        s, ds, total = row(w.S, d), row(w.dS, d), w.totals_v
        for v in range(len(s)):
            total[v] += s[v] * ds[v]


@piece(of="value_decay")
def value_gate_vjp(w: Work):
    """Gradient of gv."""
    channel_crossings(w.crossed_v, w.readers_v, w.writers_v, w.totals_v)
    save(w.crossed_v, w.out_dgv, (w.BATCH, w.HEAD, w.t), (0, w.V))
