"""One chunk of one state, as a program: what is loaded, erased, read and written. The algebra is one_chunk.py's."""

from __future__ import annotations

from typing import Any, NamedTuple

from ...runtime.compiled.rows import LINE
from ...runtime.compiled.tiles import FULL, LEFT_LOWER, LEFT_UPPER, OUT_LOWER
from ..types import Decay, Erase
from .decay import BLOCK
from .features import Features, Mapped
from .interpreter.program import COLUMN, HEAD, MINUS, ONE, SCALE, STOP, TURNED, WIDTH, Program
from .sums import Sums
from .table import IN_BETA, IN_BONUS, IN_G, IN_K, IN_PUSH, IN_Q, IN_READ, IN_V, OUT


class Cell(NamedTuple):
    """A kind of call: all that a program depends on."""

    dtype: str  # of the computation
    K: int
    V: int  # value columns of a task
    C: int  # tokens of a chunk
    decay: Decay
    erase: Erase
    early_query: bool  # queries read BEFORE
    early_read: bool  # the erase vector reads BEFORE
    own_read: bool  # it is not k
    asked: bool  # there are queries
    queries: int  # heads of queries a head of the state
    bonus: bool
    started: bool  # there is an initial state
    direct: frozenset[int]  # arrays that are read where they lie
    features: Features | None = None  # what q and k go through: K counts features
    fading: bool = False  # a decay on the value axis; the adjoint alone has one
    averaged: bool = False  # outputs are divided by the sum of their weights

    @property
    def compensates(self) -> bool:
        """Whether a float32 system is solved with what its rounding leaves out of the rows whose beta > 1.

        1 - beta |k|^2 < 0 reflects what is stored: keys that come again forget nothing, and the one rounding of
        |k|^2 in a chunk would add up over all of its tokens. Where 0 < beta <= 1 a token forgets its share beta of
        the errors so far and adds that share of one rounding.
        """
        return self.dtype == "float32" and self.erase is Erase.DELTA and self.decay is not Decay.VECTOR


class Chunk:
    """Registers and matrices of a chunk, and the operations on them."""

    def __init__(self, p: Program, cell: Cell):
        self.p, self.cell = p, cell
        C, K, V = cell.C, cell.K, cell.V
        p.values[WIDTH] = V
        self.t, self.c, self.whole = p.register(), p.register(C), p.register(C)
        self.following = p.register()
        self.K, self.one = p.literal(K), p.literal(1)
        self.given = K if cell.features is None else cell.features.K  # channels of q and k as they are given
        self.taken: dict[int, int] = {}
        self.kT, self.P, self.factor = p.matrix(K, C), p.matrix(C, C), p.vector(C)
        self.hat = p.matrix(C, K)
        self.g64, self.sums = p.vector(C + 1, size=8), p.vector(C + 64, size=8)
        self.X = p.matrix(C, V) if cell.erase is Erase.DELTA else 0
        self.Y, self.bT = (p.matrix(C, V), p.matrix(K, C)) if cell.erase is Erase.FREE else (0, 0)
        self.N = p.matrix(C, C) if cell.erase is not Erase.NONE else 0
        self.reflects = p.register()
        if cell.compensates:
            self.rest, self.correction = p.matrix(C, C), p.matrix(C, V)
        self.ended = p.matrix(C, V)
        self.map = None if cell.features is None else Mapped(p, cell.features, C)
        self.weights_sum = Sums(p, C, K) if cell.averaged else None
        self.beta = p.vector(C)
        self.tables()
        if cell.decay is Decay.VECTOR:
            self.first, self.last, self.W = p.matrix(C, K, above=1), p.matrix(C, K), p.matrix(C, K)
            self.before_first = p.moved(self.first, -1)
            self.carry = p.vector(K)
            self.near, self.far, self.farT = p.matrix(BLOCK, K), p.matrix(C, K), p.matrix(K, C)

    def tables(self) -> None:
        """e^{s} between tokens, from the start, to the end, and of the whole chunk."""
        p, C = self.p, self.cell.C
        self.E, self.start, self.end = p.matrix(C, C, above=1), p.vector(C + 1), p.vector(C)
        self.carry = self.own_carry = p.same(p.vector(1))
        self.views_of_tables()

    def views_of_tables(self) -> None:
        """Rows moved: what a reader BEFORE sees of E, and START from the first token on."""
        self.E_before, self.start_after = self.p.moved(self.E, -1), self.p.moved(self.start, 1)

    def once(self) -> None:
        """What a task needs once: tables where no token decays, or each channel on its own; those of a map."""
        p = self.p
        if self.map is not None:
            self.map.point()
        if self.cell.decay is not Decay.SCALAR:
            p.pairs(-1, 0, HEAD, p.literal(self.cell.C), self.g64, self.sums, self.E, self.start, self.end,
                    self.own_carry)  # fmt: skip

    def begin(self) -> None:
        """c tokens from t on, in whole tiles."""
        self.p.minus(self.c, STOP, self.t)
        self.p.least(self.c, self.c, self.p.literal(self.cell.C))
        self.p.whole(self.whole, self.c)

    def expect(self, *arrays: int) -> None:
        """The next chunk of these arrays: products ask for a few of its lines before each of their tiles."""
        p, C, before = self.p, self.cell.C, self.p.lines
        wide = {array: array in (IN_V, OUT) for array in arrays}
        for array in arrays:
            p.lines += C * -(-(self.cell.V if wide[array] else self.given) * p.dtype.itemsize // LINE)
        p.expect_none(p.vector(p.lines - before, size=8))
        p.add(self.following, self.t, self.c)
        for array in arrays:
            column, columns = (COLUMN, WIDTH) if wide[array] else (p.literal(0), p.literal(self.given))
            p.expect(array, self.following, STOP, HEAD, column, columns, p.literal(C))

    def take(self, array: int, width: int, head: int = HEAD, column: int | None = None, columns: int = 0) -> int:
        """A matrix of the chunk's tokens: where they lie, or loaded; features of q and of k where they are mapped."""
        if self.map is not None and array in (IN_Q, IN_K):
            return self.map.features(array, self._take(array, self.given, head), self.c)
        return self._take(array, width, head, column, columns)

    def _take(self, array: int, width: int, head: int, column: int | None = None, columns: int = 0) -> int:
        p, column = self.p, self.p.literal(0) if column is None else column
        if array in self.cell.direct:
            self.taken.setdefault(array, p.view() if array not in self.taken else 0)
            p.point(self.taken[array], array, self.t, head, column)
        else:
            self.taken.setdefault(array, p.matrix(self.cell.C, width) if array not in self.taken else 0)
            p.load(self.taken[array], array, self.t, head, self.c, column, columns or p.literal(width))
        return self.taken[array]

    def writers(self) -> None:
        """k and v, and what is needed of the erase vectors."""
        p, cell = self.p, self.cell
        self.k, self.v = self.take(IN_K, cell.K), self.take(IN_V, cell.V, column=COLUMN, columns=WIDTH)
        self.turn_keys()
        self.r = self.k
        if cell.erase is not Erase.NONE and cell.own_read:
            self.r = self.take(IN_READ, cell.K)
        if cell.erase is Erase.DELTA:
            p.load_column(self.beta, IN_BETA, self.t, HEAD, self.c)
            if cell.compensates:
                p.any_above_one(self.reflects, self.beta, self.c)
        if cell.erase is Erase.FREE:
            self.b = self.take(IN_PUSH, cell.K)
            p.transpose(self.b, self.c, self.K, self.bT)

    def turn_keys(self) -> None:
        """Keys as grams read them."""
        self.p.transpose(self.k, self.c, self.K, self.kT)

    def decays(self) -> None:
        """The tables of e^s of the chunk."""
        p, decay = self.p, self.cell.decay
        if decay is Decay.SCALAR:
            p.pairs(IN_G, self.t, HEAD, self.c, self.g64, self.sums, self.E, self.start, self.end, self.carry)
        elif decay is Decay.VECTOR:
            p.load(self.W, IN_G, self.t, HEAD, self.c, p.literal(0), self.K)
            p.channels(self.W, self.c, self.K, self.first, self.last, self.carry)

    def gram(self, x: int, y: int, yT: int, early: bool, strict: bool, factors: int, out: int) -> None:
        """out_ij = factors_i (what x_i finds of y_j), 0 above the diagonal (strict: and on it)."""
        p, c = self.p, self.c
        if self.cell.decay is Decay.VECTOR:
            p.channel_gram(x, y, self.W, early, c, self.K, out, self.near, self.far, self.farT)
        else:
            p.multiply(x, yT, c, c, self.K, out, ONE, OUT_LOWER)
        if out == self.N and self.cell.compensates:
            self.compensate()
        p.weigh(out, self.table(early), c, self.whole, strict, factors)

    def compensate(self) -> None:
        """What float32 leaves out of the system's rows with beta > 1, if there is one: N is the bare product still."""
        p, c = self.p, self.c
        with p.only_if(p.literal(0), self.reflects):
            p.rest(self.r, self.k, self.N, c, self.K, self.rest, self.beta)
            p.weigh(self.rest, self.table(self.cell.early_read), c, self.whole, True, self.beta)

    def solve(self, N: int, X: int, transposed: bool = False) -> None:
        """X <- (1 + N)^-1 X, or its transpose; and once more for the rest of N where that was computed."""
        p, solve = self.p, self.p.solve_transposed if transposed else self.p.solve
        p.clear(X, self.c, self.whole, WIDTH)
        solve(N, X, self.whole, WIDTH)
        if self.cell.compensates:
            with p.only_if(p.literal(0), self.reflects):
                half = LEFT_UPPER + TURNED if transposed else LEFT_LOWER
                p.multiply(self.rest, X, self.c, WIDTH, self.c, self.correction, MINUS, half)
                p.clear(self.correction, self.c, self.whole, WIDTH)
                solve(N, self.correction, self.whole, WIDTH)
                p.accumulate(self.correction, self.c, WIDTH, X)

    def table(self, early: bool) -> int:
        """e^{s(j, i)}; to i - 1 if early."""
        return self.E_before if early else self.E

    def reader(self, x: int, early: bool) -> int:
        """x_i e^{s(start, i)} where the decay is a channel's; x itself where `reach` does it."""
        if self.cell.decay is not Decay.VECTOR:
            return x
        self.p.hadamard(x, self.before_first if early else self.first, self.c, self.K, self.hat)
        return self.hat

    def asking(self, x: int, factors: int) -> tuple[int, int]:
        """(Y, rows) with diag(rows) Y^T = (diag(factors) x)^T: features are not copied for one factor of all rows."""
        if self.map is not None and factors in (ONE, SCALE):
            return x, factors
        self.p.copy(x, self.c, self.K, self.hat, factors)
        return self.hat, ONE

    def reach(self, early: bool, by: int, sign: int = 1) -> int:
        """Factors sign by_i e^{s(start, i)} of rows (early: to i - 1)."""
        scalar = self.cell.decay is Decay.SCALAR
        if not scalar and sign > 0:
            return by
        e = (self.start if early else self.start_after) if scalar else ONE
        self.p.reach(self.factor, by, e, self.c, sign)
        return self.factor

    def system(self) -> int:
        """The system of erasing: diag(beta) gram(r, k), or -gram(a, b)."""
        delta = self.cell.erase is Erase.DELTA
        early = not delta or self.cell.early_read
        y, yT = (self.k, self.kT) if delta else (self.b, self.bT)
        self.gram(self.r, y, yT, early, True, self.beta if delta else MINUS, self.N)
        return self.N

    def erase(self, S: int, N: int) -> None:
        """What the chunk writes, from the incoming state S and the system N.

        DELTA  (1 + diag(beta) gram(r, k)) X = diag(beta) (v - r^ S)
        FREE   (1 - gram(a, b)) Y = a^ S + gram(a, k) v
        """
        p, c, erase, early = self.p, self.c, self.cell.erase, self.cell.early_read
        if erase is Erase.DELTA:
            hat, factors = self.reader(self.r, early), self.reach(early, self.beta, -1)
            p.multiply(hat, S, c, WIDTH, self.K, self.X, factors, added=self.v, added_rows=self.beta)
            self.solve(N, self.X)
        elif erase is Erase.FREE:
            self.gram(self.r, self.k, self.kT, True, True, ONE, self.P)
            hat, factors = self.reader(self.r, True), self.reach(True, ONE)
            p.multiply(hat, S, c, WIDTH, self.K, self.Y, factors)
            p.multiply(self.P, self.v, c, WIDTH, c, self.Y, ONE, LEFT_LOWER, added=self.Y)
            self.solve(N, self.Y)

    def written(self) -> list[tuple[int, int, int]]:
        """(write vectors, the same turned, values) of each write."""
        writes = [(self.k, self.kT, self.X or self.v)]
        return [*writes, (self.b, self.bT, self.Y)] if self.cell.erase is Erase.FREE else writes

    def write(self, S: int, out: int) -> None:
        """out = carry(S) + k^^T X + b^^T Y"""
        p, c, decay = self.p, self.c, self.cell.decay
        added, factors = S, ONE if decay is Decay.NONE else self.carry
        for y, _, w in self.written():
            w = self.ending(w)
            if decay is Decay.VECTOR:
                p.hadamard(y, self.last, c, self.K, self.hat)
                y = self.hat
            elif decay is Decay.SCALAR:
                p.copy(w, c, WIDTH, self.ended, self.end)
                w = self.ended
            p.multiply(y, w, self.K, WIDTH, c, out, ONE, FULL + TURNED, added=added, added_rows=factors)
            added, factors = out, ONE

    def ending(self, w: int) -> int:
        """Values as they stand at the end of the chunk, but for a decay on the key axis."""
        return w

    def each_query(self, body: Any) -> None:
        """body(j) for the heads j of queries of this head of the state."""
        p, cell = self.p, self.cell
        if cell.queries == 1:
            body(HEAD)
            return
        j, end, n = p.register(), p.register(), p.literal(cell.queries)
        p.times(j, HEAD, n)
        p.add(end, j, n)
        top = p.here()
        body(j)
        p.add(j, j, self.one)
        p.less(j, end, top)

    def read(self, S: int, j: int) -> None:
        """out = scale (q^ S + gram(q, k) X + gram(q, b) Y), with the bonus on the diagonal."""
        p, c, cell, early = self.p, self.c, self.cell, self.cell.early_query
        q, out, inside = self.take(IN_Q, cell.K, j), self.out, self.ended
        p.point(out, OUT, self.t, j, COLUMN)
        for n, (y, yT, w) in enumerate(self.written()):
            self.gram(q, y, yT, early, early, SCALE, self.P)
            if cell.bonus:
                p.bonus(self.P, q, y, self.u, c, self.K)
            p.multiply(self.P, w, c, WIDTH, c, inside, ONE, LEFT_LOWER, added=inside if n else 0)
        hat, factors, over = self.reader(q, early), self.reach(early, SCALE), ONE
        if self.weights_sum is not None:
            factors, over = self.weights_sum.find(self, self.P, q, j)
        p.multiply(hat, S, c, WIDTH, self.K, out, factors, added=inside, added_rows=over)

    def load_bonus(self) -> None:
        """u of a head, once a task."""
        self.out = self.p.view()
        if self.cell.bonus:
            self.u = self.p.matrix(1, self.cell.K)
            self.p.load(self.u, IN_BONUS, self.p.literal(0), HEAD, self.one, self.p.literal(0), self.K)
