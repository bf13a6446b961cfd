"""Outputs over the sum of their weights, with z as a row beside the state, as operations of a chunk; and the adjoint.

    d_i = eps + scale q_i z + sum_{j<=i} P_ij        out_i = (scale q_i S + sum_{j<=i} P_ij v_j) / d_i
    z += sum_j k_j

With c_i = dout_i / d_i the cotangent of the numerator, that of d_i is the number w_i = -c_i . out_i, and

    dP_ij = c_i . v_j + w_i        dq_i += scale w_i z        dk_j += dz        dz += sum_i scale w_i q_i

dz on the right of dk_j being that of the outgoing z. A task has all value columns: there is one z a head.
"""

from __future__ import annotations

from typing import Any

from .interpreter.program import EARLIER, FROM, HEAD, ONE, SCALE, STATE, TO, WIDTH, Program
from .slots import Slots
from .table import IN_DOUT, IN_EPS, IN_STATE, OUT, OUT_SUMS, STARTS


class Sums:
    """z, the sum of all keys, in the state's last column, and what outputs are divided by."""

    def __init__(self, p: Program, C: int, K: int):
        self.p, self.z, self.eps = p, p.vector(K), p.vector(1)
        self.ones = p.part(ONE, 0, 0, 0)
        self.found, self.over, self.over_scaled = p.vector(C), p.vector(C), p.vector(C)

    def load(self, x: Any) -> None:
        """z of the state that the task begins with."""
        p, zero, one = self.p, self.p.literal(0), x.one
        p.load(self.eps, IN_EPS, zero, HEAD, one, zero, one)
        with p.only_if(EARLIER, one):
            if x.cell.started:
                p.state(self.z, IN_STATE, STATE, HEAD, x.K, WIDTH, one)
            else:
                p.clear(self.z, zero, x.K, one)
        with p.only_if(zero, EARLIER):
            p.state(self.z, STARTS, FROM, HEAD, x.K, WIDTH, one)

    def find(self, x: Any, P: int, q: int, j: int) -> tuple[int, int]:
        """(scale / sums, 1 / sums) of the rows q, P being their weights in the chunk."""
        p = self.p
        p.averages(P, q, self.z, x.c, x.K, SCALE, self.eps, self.found, self.over, self.over_scaled)
        p.put(self.found, OUT_SUMS, x.t, j, x.c, x.one, ONE)
        return self.over_scaled, self.over

    def write(self, x: Any) -> None:
        """z + sum of k_t"""
        self.p.multiply(self.ones, x.k, x.one, x.K, x.c, self.z, ONE, added=self.z)

    def store(self, x: Any) -> None:
        """z of the state that the task leaves."""
        self.p.store_state(self.z, STARTS, TO, HEAD, x.K, WIDTH, x.one)


class SumsPull:
    """z of each chunk in its slot, dz, and the cotangents w of what outputs are divided by."""

    def __init__(self, p: Program, cell: Any):
        C, K, V = cell.C, cell.K, cell.V
        self.p, self.C, self.width, self.K, self.V = p, C, K, p.literal(K), p.literal(V)
        self.z, self.dz, self.w, self.w_scaled, self.sums = (p.vector(n) for n in (K, K, C, C, C))
        self.cotangent, units = p.matrix(C, V), p.vector(C)
        self.dz_rows, self.units, self.units_row = p.same(self.dz), units, p.same(units)
        self.one, self.ones = p.literal(1), p.part(ONE, 0, 0, 0)

    def keep(self, slots: Slots) -> None:
        """z that a chunk begins with lies in its slot."""
        base = self.p.vector(self.width)
        self.here, self.rows, self.next = slots.view(base), slots.view(self.p.same(base)), slots.next(base)

    def once(self) -> None:
        """A row of ones."""
        self.p.reach(self.units, ONE, ONE, self.p.literal(self.C), 1)

    def add_keys(self, k: int, c: int, z: int, out: int) -> None:
        """out = z + sum of k_t"""
        self.p.multiply(self.ones, k, self.one, self.K, c, out, ONE, added=z)

    def ask(self, x: Any, j: int) -> int:
        """c of what query head j has read; its w stays here."""
        p, V = self.p, x.cell.V
        dout, out = x.take(IN_DOUT, V, j), x.take(OUT, V, j)
        p.load_column(self.sums, OUT_SUMS, x.t, j, x.c)
        p.averages_pull(dout, out, self.sums, x.c, self.V, self.cotangent, self.w)
        p.reach(self.w_scaled, self.w, SCALE, x.c, 1)
        return self.cotangent

    def read_pull(self, q: int, c: int) -> None:
        """dz += scale sum of w_i q_i"""
        self.p.multiply(self.w, q, self.one, self.K, c, self.dz, SCALE, added=self.dz, added_rows=ONE)
