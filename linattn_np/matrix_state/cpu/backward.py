"""The adjoint of a chunk, as operations.

The algebra is one_chunk.py's: c is the cotangent of q^ S + ..., dS the gradient of the outgoing state. numba_walk.py
says in which order chunks are walked.
"""

from __future__ import annotations

from ...runtime.compiled.tiles import FULL, LEFT_LOWER, LEFT_UPPER, OUT_LOWER
from ..types import Decay, Erase
from .chunk import Cell, Chunk
from .decay import BLOCK
from .fading import Fading
from .interpreter.program import HEAD, MINUS, ONE, SCALE, TURNED, Program
from .slots import Slots
from .sums import SumsPull
from .table import IN_DOUT, IN_K, IN_Q, OUT_DBETA, OUT_DG, OUT_DK, OUT_DPUSH, OUT_DQ, OUT_DREAD, OUT_DV


class BackwardChunk(Chunk):
    """A chunk whose tables and written values lie in slots, and its adjoint."""

    def __init__(self, p: Program, cell: Cell):
        super().__init__(p, cell)
        C, K, V = cell.C, cell.K, cell.V
        vector = cell.decay is Decay.VECTOR
        self.wT, self.ST, self.dST = p.matrix(V, C), p.matrix(V, K), p.matrix(V, K)
        self.dS, self.dX, self.dP = p.matrix(K, V), p.matrix(C, V), p.matrix(C, C)
        self.dQ, self.dK = (p.matrix(C, K) if self.map is None else self.map.matrix() for _ in range(2))
        self.back = p.matrix(C, K)
        self.crossed = p.matrix(C, C, above=1)
        self.crossed_before = p.moved(self.crossed, -1)
        if vector:
            self.readers, self.writers_ = p.matrix(C, K, above=1), p.matrix(C, K)
            self.inside, self.scratch = p.matrix(C, K), p.matrix(2 * BLOCK + 1 + 3 * C, K)
        else:
            self.readers, self.writers_ = p.vector(C, above=1), p.vector(C)
        self.readers_before = p.moved(self.readers, -1)
        self.total = p.vector(max(C, K))
        if cell.erase is Erase.DELTA:
            self.M, self.dbeta, self.dR = p.matrix(C, C), p.vector(C), p.matrix(C, K)
        if cell.erase is Erase.FREE:
            self.dY, self.dB, self.dR = p.matrix(C, V), p.matrix(C, K), p.matrix(C, K)
            self.A, self.dA = p.matrix(C, C), p.matrix(C, C)
        self.u, self.dU = (p.matrix(1, K), p.matrix(1, K)) if cell.bonus else (0, 0)
        self.zero, self.width, self.c1 = p.literal(0), p.literal(V), p.register()
        self.fading = Fading(p, C, V) if cell.fading else None
        self.averaging = SumsPull(p, cell) if cell.averaged else None
        self.returns = False  # whether the chunk is walked back: features of keys are kept by then

    # what is kept of a chunk

    def slots(self, most: int) -> int:
        """Lays the slots out; how many there are."""
        p, cell = self.p, self.cell
        self.kept = Slots(p)
        keep = lambda m, n, above=0: self.kept.view(p.matrix(m, n, above))  # noqa: E731
        base = p.matrix(cell.K, cell.V)
        self.S, self.next_S = self.kept.view(base), self.kept.next(base)
        if self.averaging is not None:
            self.averaging.keep(self.kept)
        if self.map is not None:
            self.map.keep(self.kept)
        if self.X:
            self.X = keep(cell.C, cell.V)
        if self.Y:
            self.Y = keep(cell.C, cell.V)
        if self.N:
            self.N = keep(cell.C, cell.C)
        if cell.compensates:
            self.rest = keep(cell.C, cell.C)
        if cell.decay is Decay.SCALAR:
            base = p.matrix(cell.C, cell.C, above=1)
            self.E, self.E_before = self.kept.view(base), self.kept.view(p.moved(base, -1))
            base = p.vector(cell.C + 1)
            self.start, self.start_after = self.kept.view(base), self.kept.view(p.moved(base, 1))
            self.end, self.carry = self.kept.view(p.vector(cell.C)), self.kept.view(p.same(p.vector(1)))
        return self.kept.close(most)

    def once(self) -> None:
        """And a row of ones."""
        super().once()
        if self.averaging is not None:
            self.averaging.once()

    def take(self, array: int, width: int, head: int = HEAD, column: int | None = None, columns: int = 0) -> int:
        """Features of keys that are kept are not computed again."""
        if self.returns and self.map is not None and array == IN_K:
            return self.map.made[IN_K]
        return super().take(array, width, head, column, columns)

    def turn_keys(self) -> None:
        """Forward there are no grams where nothing is erased."""
        if self.returns or self.cell.erase is not Erase.NONE:
            super().turn_keys()

    def system(self) -> int:
        """gram(r, k) is kept without beta, which may be 0."""
        if self.cell.erase is not Erase.DELTA:
            return super().system()
        self.gram(self.r, self.k, self.kT, self.cell.early_read, True, ONE, self.N)
        return self.scale_system()

    def scale_system(self) -> int:
        """M = diag(beta) N"""
        self.p.copy(self.N, self.c, self.whole, self.M, self.beta)
        self.p.clear(self.M, self.c, self.whole, self.whole)
        return self.M

    def decays(self) -> None:
        """The tables of both axes."""
        super().decays()
        if self.fading is not None:
            self.fading.tables(self)

    def decays_again(self) -> None:
        """Those that are not kept."""
        if self.cell.decay is Decay.VECTOR:
            super().decays()
        if self.fading is not None:
            self.fading.tables(self)

    def ending(self, w: int) -> int:
        """With a decay on the value axis: w as it stands at the end of the chunk."""
        return w if self.fading is None else self.fading.ending(self, w)

    def write(self, S: int, out: int) -> None:
        """Likewise for the state."""
        if self.fading is not None:
            self.fading.carried(self, S, out)
            S = out
        super().write(S, out)

    # the adjoint

    def future(self) -> None:
        """From dS of the outgoing state: dw = y^ dS, dy = to_end(w dS^T) and what the gates get; dS is then carried."""
        p, c, cell, K, V = self.p, self.c, self.cell, self.K, self.width
        p.transpose(self.dS, K, V, self.dST)
        if cell.decay is Decay.VECTOR:
            p.clear(self.inside, self.zero, c, K)
            p.clear(self.readers_before, self.zero, self.c1, K)
            p.clear(self.writers_, self.zero, c, K)
        elif cell.decay is Decay.SCALAR:
            p.clear(self.crossed_before, self.zero, self.c1, c)
            p.clear(self.readers_before, self.zero, self.c1, self.one)
            p.clear(self.writers_, self.zero, c, self.one)
        if self.fading is not None:
            self.fading.begin(self)
        for (y, _, w), (dw, dy) in zip(self.written(), self.pulled(), strict=True):
            self._future(y, w, dw, dy)
        if self.fading is not None:
            self.fading.carried(self, self.dS, self.dS)
        if cell.decay is not Decay.NONE:
            overlap = p.overlap if cell.decay is Decay.SCALAR else p.channel_overlap
            overlap(self.S, self.dS, K, V, self.carry, self.total)
            p.copy(self.dS, K, V, self.dS, self.carry)
        if self.fading is not None:
            self.fading.carried_pull(self)

    def pulled(self) -> list[tuple[int, int]]:
        """(gradient of the values, gradient of the write vectors) of each write."""
        writes = [(self.dX, self.dK)]
        return [*writes, (self.dY, self.dB)] if self.cell.erase is Erase.FREE else writes

    def _future(self, y: int, w: int, dw: int, dy: int) -> None:
        p, c, K, V = self.p, self.c, self.K, self.width
        ends, values = self.end if self.cell.decay is Decay.SCALAR else ONE, self.ending(w)
        if self.cell.decay is Decay.VECTOR:
            p.hadamard(y, self.last, c, K, self.hat)
            p.multiply(self.hat, self.dS, c, V, K, dw, ONE)
            p.multiply(values, self.dST, c, K, V, dy, ONE)
            p.hadamard(dy, self.last, c, K, dy)
            p.add_hadamard(y, dy, c, K, self.writers_)
        else:
            p.multiply(y, self.dS, c, V, K, dw, ends)
            later = () if self.averaging is None else (FULL, self.averaging.dz_rows, ONE)
            p.multiply(values, self.dST, c, K, V, dy, ends, *later)
            if self.cell.decay is Decay.SCALAR:
                p.dots(self.writers_, y, dy, c, K, 1)
        if self.fading is not None:
            self.fading.ended_pull(self, w, dw)

    def reader_pull(self, x: int, cotangent: int, early: bool, by: int, sign: int, dx: int, raw: int = 0) -> None:
        """dx = sign by_i from_start(c S^T), what the gates get; dS += (sign by_i x_i)^^T c; raw = c S^T if asked."""
        p, c, K, V, vector = self.p, self.c, self.K, self.width, self.cell.decay is Decay.VECTOR
        factors = self.reach(early, by, sign)
        if raw:
            p.multiply(cotangent, self.ST, c, K, V, raw, ONE)
            p.copy(raw, c, K, dx, factors)
        else:
            beside = () if self.averaging is None else (FULL, self.averaging.rows, self.averaging.w_scaled)
            p.multiply(cotangent, self.ST, c, K, V, dx, factors, *beside)
        readers = self.readers_before if early else self.readers
        if vector:
            first = self.before_first if early else self.first
            p.hadamard(dx, first, c, K, dx)
            p.add_hadamard(x, dx, c, K, readers)
            p.hadamard(x, first, c, K, self.hat)
            x = self.hat
        elif self.cell.decay is Decay.SCALAR:
            p.dots(readers, x, dx, c, K, 1)
        x, rows = self.asking(x, factors)
        p.multiply(x, cotangent, K, V, c, self.dS, rows, FULL + TURNED, added=self.dS, added_rows=ONE)

    def gram_pull(self, dP: int, P: int, early: bool, strict: bool, factors: int, x: int, y: int, dx: int,
                  dy: int) -> None:  # fmt: skip
        """dx += rows(dP, y), dy += cols(dP, x) and what the gates get, of P = factors (.) gram(x, y)."""
        p, c, K = self.p, self.c, self.K
        p.pull(dP, P, self.table(early), c, strict, factors, self.crossed_before if early else self.crossed)
        if self.cell.decay is Decay.VECTOR:
            p.channel_pull(dP, x, y, self.W, early, c, K, dx, dy, self.inside, self.scratch)
        else:
            p.multiply(dP, y, c, K, c, dx, ONE, LEFT_LOWER, added=dx)
            p.multiply(dP, x, c, K, c, dy, ONE, LEFT_UPPER + TURNED, added=dy)

    def query_pull(self, j: int) -> None:
        """The adjoint of what query j reads: dq, and its part of dX, dk and dS."""
        p, c, cell, early = self.p, self.c, self.cell, self.cell.early_query
        q, fading, averaging = self.take(IN_Q, cell.K, j), self.fading, self.averaging
        cotangent = self.take(IN_DOUT, cell.V, j) if averaging is None else averaging.ask(self, j)
        asked = cotangent if fading is None else fading.asks(self, cotangent, early)
        self.reader_pull(q, asked, early, SCALE, 1, self.dQ)
        if fading is not None:
            fading.read_pull(self, early)
        if averaging is not None:
            averaging.read_pull(q, c)
        own = () if averaging is None else (averaging.units_row, averaging.w)  # what the column of ones adds to dP
        for (y, yT, w), (dw, dy) in zip(self.written(), self.pulled(), strict=True):
            self.gram(q, y, yT, early, early, SCALE, self.P)
            if fading is not None:
                fading.inside_pull(self, self.P, cotangent, w, early, dw, self.dP)
            else:
                p.transpose(w, c, self.width, self.wT)
                p.multiply(cotangent, self.wT, c, c, self.width, self.dP, ONE, OUT_LOWER, *own)
            if cell.bonus:
                p.bonus(self.P, q, y, self.u, c, self.K)
                p.bonus_pull(self.dP, q, y, self.u, c, self.K, self.dQ, dy, self.dU)
            if fading is None:
                p.multiply(self.P, cotangent, c, self.width, c, dw, ONE, LEFT_UPPER + TURNED, added=dw)
            self.gram_pull(self.dP, self.P, early, early, SCALE, q, y, self.dQ, dy)
        self.put_mapped(IN_Q, q, self.dQ, OUT_DQ, j)

    def put_mapped(self, array: int, x: int, dx: int, out: int, head: int) -> None:
        """Gradient of queries or keys, through their map where they have one."""
        made = self.map
        if made is None:
            self.p.put(dx, out, self.t, head, self.c, self.K, ONE)
        else:
            made.pull(array, self._take(array, self.given, head), x, dx, self.c, lambda d, by: self.p.put(
                d, out, self.t, head, self.c, made.given, by))  # fmt: skip

    def delta_pull(self) -> None:
        """dZ = (1 + M)^-T dX, M = diag(beta) N; dv = beta dZ, dM = -dZ X^T, and the adjoint of r^ S."""
        p, c, V, early = self.p, self.c, self.width, self.cell.early_read
        self.scale_system()
        self.solve(self.M, self.dX, transposed=True)
        p.put(self.dX, OUT_DV, self.t, HEAD, c, V, self.beta)
        p.transpose(self.X, c, V, self.wT)
        p.multiply(self.dX, self.wT, c, c, V, self.dP, MINUS, OUT_LOWER)
        self.reader_pull(self.r, self.dX, early, self.beta, -1, self.dR, self.back)
        p.clear(self.dbeta, self.zero, c, self.one)
        p.dots(self.dbeta, self.dX, self.v, c, V, 1)
        p.dots_below(self.dbeta, self.N, self.dP, c, c, 1)
        hat = self.reader(self.r, early)
        p.copy(hat, c, self.K, self.hat, self.reach(early, ONE))
        p.dots(self.dbeta, self.hat, self.back, c, self.K, -1)  # dbeta_i = dZ_i . (v_i - r^_i S - sum_j N_ij X_j)
        p.put(self.dbeta, OUT_DBETA, self.t, HEAD, c, self.one, ONE)
        self.gram_pull(self.dP, self.M, early, True, self.beta, self.r, self.k, self.dR, self.dK)
        p.put(self.dR, OUT_DREAD, self.t, HEAD, c, self.K, ONE)

    def free_pull(self) -> None:
        """dZ = (1 + N)^-T dY, N = -gram(a, b); dA = dZ v^T of A = gram(a, k), dN = -dZ Y^T, and the adjoint of a^ S."""
        p, c, V = self.p, self.c, self.width
        self.solve(self.N, self.dY, transposed=True)
        self.gram(self.r, self.k, self.kT, True, True, ONE, self.A)
        p.multiply(self.A, self.dY, c, V, c, self.dX, ONE, LEFT_UPPER + TURNED, added=self.dX)
        p.put(self.dX, OUT_DV, self.t, HEAD, c, V, ONE)
        self.reader_pull(self.r, self.dY, True, ONE, 1, self.dR)
        for w, factors, P, out, y, dy in ((self.v, ONE, self.A, self.dA, self.k, self.dK),
                                          (self.Y, MINUS, self.N, self.dP, self.b, self.dB)):  # fmt: skip
            p.transpose(w, c, V, self.wT)
            p.multiply(self.dY, self.wT, c, c, V, out, factors, OUT_LOWER)
            self.gram_pull(out, P, True, True, factors, self.r, y, self.dR, dy)
        p.put(self.dR, OUT_DREAD, self.t, HEAD, c, self.K, ONE)
        p.put(self.dB, OUT_DPUSH, self.t, HEAD, c, self.K, ONE)

    def pull(self) -> None:
        """The adjoint of the chunk: gradients of its inputs, and dS of its incoming state."""
        p, c, cell = self.p, self.c, self.cell
        p.add(self.c1, c, self.one)
        p.transpose(self.S, self.K, self.width, self.ST)
        self.future()
        if cell.asked:
            self.each_query(self.query_pull)
        if cell.erase is Erase.DELTA:
            self.delta_pull()
        elif cell.erase is Erase.FREE:
            self.free_pull()
        else:
            p.put(self.dX, OUT_DV, self.t, HEAD, c, self.width, ONE)
        self.put_mapped(IN_K, self.k, self.dK, OUT_DK, HEAD)
        if cell.decay is Decay.SCALAR:
            p.crossings(OUT_DG, self.t, HEAD, c, self.crossed, self.readers, self.writers_, self.total, self.sums)
        elif cell.decay is Decay.VECTOR:
            p.channel_crossings(OUT_DG, self.t, HEAD, c, self.K, self.inside, self.readers, self.writers_, self.total)
        if self.fading is not None:
            self.fading.put(self)
