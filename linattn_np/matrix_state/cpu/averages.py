"""Outputs over the sum of their weights, with z, the sum of all keys, as an extra column of the state; the adjoint.

    d_i = eps + scale q_i z + sum_{j<=i} P_ij        out_i = (scale q_i S + sum_{j<=i} P_ij v_j) / d_i
    z += sum_j k_j

With c_i = dout_i / d_i the cotangent of the numerator, that of d_i is the number w_i = -c_i . out_i, and

    dP_ij = c_i . v_j + w_i        dq_i += scale w_i z        dk_j += dz        dz += sum_i scale w_i q_i

dz on the right of dk_j being that of the outgoing z. A task has all value columns: there is one z a head.
"""

from __future__ import annotations

from ...ops.cpu.numbers import number
from ...ops.cpu.rows import add_outer, add_weighted_rows, clear, times
from ...ops.cpu.storage import Place, load, load_column, save, save_column
from ...runtime.pieces.piece import Stored, Vector, Whole, piece
from ...runtime.pieces.tiles import dot, sum_of
from ...runtime.pieces.views import as_row, field_of, row, rows, transposed
from ...runtime.pieces.workspace import TOKENS
from .workspace import Work


@piece(of="averaged")
def load_z(x: Stored, place: Place, column: Whole, z: Vector, given: Whole):
    """z = the column of a head's state behind its values, at place = (state, head, 0); zeros where none is given."""
    clear(as_row(z))
    if given:
        load(x, place, (column, 1), rows(transposed(as_row(z)), 0, field_of(x, TOKENS)))


@piece(of="averaged")
def save_z(z: Vector, x: Stored, place: Place, column: Whole):
    """The column of a head's state behind its values = z."""
    save(rows(transposed(as_row(z)), 0, field_of(x, TOKENS)), x, place, (column, 1))


@piece(of="averaged")
def find_averages(w: Work, j: Whole):
    """averages_i = d_i of the rows of query head j, stored for the adjoint, and over_i = 1 / d_i; 0 of 0."""
    for i in range(w.c):
        total = w.scale * dot(row(w.q, i), w.z, w.K_lanes) + sum_of(row(w.P, i), i + 1) + w.eps
        w.averages[i] = total
        w.over[i] = 1 / total if total != 0 else number(w.over, 0)
    save_column(w.averages, w.out_sums, (w.BATCH, j, w.t))


@piece(of="averaged")
def averages_vjp(w: Work, j: Whole):
    """dout <- c_i and weights <- w_i of query head j."""
    place = (w.BATCH, j, w.t)
    load(w.out, place, (0, w.V), w.inside)
    load_column(w.out_sums, place, w.averages)
    for i in range(w.c):
        total, c, o = w.averages[i], row(w.dout, i), row(w.inside, i)
        over = 1 / total if total != 0 else number(w.averages, 0)
        for v in range(len(c)):
            c[v] *= over
        w.weights[i] = -dot(c, o, len(c))


@piece(of="averaged")
def read_z_vjp(w: Work):
    """dq_i += scale w_i z; dz += scale sum of w_i q_i"""
    times(w.scale, w.weights, None, w.factor)
    add_outer(w.factor, w.z, w.dq)
    add_weighted_rows(w.weights, w.q, w.scale, w.dz)
