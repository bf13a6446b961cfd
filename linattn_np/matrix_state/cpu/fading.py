"""Decay on the value axis in a chunk's adjoint: the functions of numba_decay.py, with values and cotangents as vectors.

With A_ij = scale gram(q, k)_ij, f_i = e^{gv(start, i)}, l_j = e^{gv(j, end)} and the cotangent c of the outputs,

    out_i = f_i (.) q^_i S + sum_j A_ij e^{gv(j, i)} (.) v_j
    S_out = carry(S) diag(f_C) + sum_j k^_j^T (l_j (.) v_j)

so A is to (c, v) what the cotangent of a gram is to (q, k): rows(A, v) is the output, cols(A, c) the gradient of v, and
gram(c, v) that of A.
"""

from __future__ import annotations

from typing import Any

from .decay import BLOCK
from .interpreter.program import HEAD, ONE, Program
from .table import IN_FADE, OUT_DFADE


class Fading:
    """Tables, memory and operations of one chunk x."""

    def __init__(self, p: Program, C: int, V: int):
        self.p = p
        self.W, self.first, self.last = p.matrix(C, V), p.matrix(C, V, above=1), p.matrix(C, V)
        self.before_first = p.moved(self.first, -1)
        self.carry = p.vector(V)
        self.carries = p.same(self.carry)  # of every row of a state
        self.near, self.far, self.farT = p.matrix(BLOCK, V), p.matrix(C, V), p.matrix(V, C)
        self.ended, self.asked, self.read, self.out = (p.matrix(C, V) for _ in range(4))
        self.inside, self.readers, self.writers = p.matrix(C, V), p.matrix(C, V, above=1), p.matrix(C, V)
        self.readers_before = p.moved(self.readers, -1)
        self.total, self.scratch = p.vector(V), p.matrix(2 * BLOCK + 1 + 3 * C, V)

    def tables(self, x: Any) -> None:
        """e^{gv} from the chunk's start and to its end."""
        self.p.load(self.W, IN_FADE, x.t, HEAD, x.c, x.zero, x.width)
        self.p.channels(self.W, x.c, x.width, self.first, self.last, self.carry)

    def ending(self, x: Any, w: int) -> int:
        """l (.) w"""
        self.p.hadamard(w, self.last, x.c, x.width, self.ended)
        return self.ended

    def carried(self, x: Any, S: int, out: int) -> None:
        """out = S diag(f_C)"""
        self.p.hadamard(S, self.carries, x.K, x.width, out)

    def begin(self, x: Any) -> None:
        """Nothing has crossed a gate."""
        self.p.clear(self.inside, x.zero, x.c, x.width)
        self.p.clear(self.readers_before, x.zero, x.c1, x.width)
        self.p.clear(self.writers, x.zero, x.c, x.width)

    def ended_pull(self, x: Any, w: int, dw: int) -> None:
        """dw <- l (.) dw, what the gates get."""
        self.p.hadamard(dw, self.last, x.c, x.width, dw)
        self.p.add_hadamard(w, dw, x.c, x.width, self.writers)

    def asks(self, x: Any, cotangent: int, early: bool) -> int:
        """f (.) c"""
        self.p.hadamard(cotangent, self.before_first if early else self.first, x.c, x.width, self.asked)
        return self.asked

    def read_pull(self, x: Any, early: bool) -> None:
        """What the gates get of f (.) q^ S: x.hat is q^, scaled."""
        p = self.p
        p.multiply(x.hat, x.S, x.c, x.width, x.K, self.read, ONE)
        p.add_hadamard(self.read, self.asked, x.c, x.width, self.readers_before if early else self.readers)

    def inside_pull(self, x: Any, P: int, cotangent: int, w: int, early: bool, dw: int, dP: int) -> None:
        """dP = gram(c, w), dw += cols(P, c) and what the gates get."""
        p = self.p
        p.channel_gram(cotangent, w, self.W, early, x.c, x.width, dP, self.near, self.far, self.farT)
        p.channel_pull(P, cotangent, w, self.W, early, x.c, x.width, self.out, dw, self.inside, self.scratch)

    def carried_pull(self, x: Any) -> None:
        """What the gates get of the carried state: S (.) dS down its columns, dS having faded on both axes."""
        self.p.column_overlap(x.S, x.dS, x.K, x.width, self.total)

    def put(self, x: Any) -> None:
        """Gradient of gv."""
        crossed = self.inside, self.readers, self.writers, self.total
        self.p.channel_crossings(OUT_DFADE, x.t, HEAD, x.c, x.width, *crossed)
