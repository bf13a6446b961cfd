"""Carries out programs: one loop over operations, compiled once a dtype for every program there will be."""

from __future__ import annotations

from collections.abc import Callable

from ....runtime.compiled import maps, rows, tiles
from ....runtime.compiled.code import entry
from ....runtime.compiled.descend import descend
from ....runtime.compiled.emit import I64, Emit, Mat, Rows, Value, routine
from .. import decay, decay_vjp
from .program import BATCH as BATCH_OF_TASK
from .program import EXPECTED, EXPECTED_END, FIELDS, INPUTS, MINUS, ONE, OP, SCALE, TURNED

# columns of the table of arrays: address; bytes to the next batch row, token, head, channel; heads that share a head
AT, BATCH, TOKEN, HEADS, CHANNEL, SHARED, STORAGE = range(7)


class Machine:
    """Tables of a task as the code sees them, and what an operation's fields say."""

    def __init__(self, e: Emit, code: Value, registers: Value, matrices: Value, arrays: Value):
        self.e, self.code, self.registers, self.matrices, self.arrays = e, code, registers, matrices, arrays

    def field(self, n: int) -> Value:
        """Field n of the operation."""
        return self.e.get(self.code + 8 * n, I64)

    def at(self, n: int) -> Value:
        """Where register n lies; n is a field."""
        return self.registers + self.field(n) * 8

    def r(self, n: int) -> Value:
        """The register that a field names."""
        return self.e.get(self.at(n), I64)

    def _matrix(self, n: int, columns: int) -> list[Value]:
        row = self.matrices + self.field(n) * 24
        return [self.e.get(row + 8 * c, I64) for c in range(columns)]

    def m(self, n: int) -> Mat:
        """The matrix that a field names."""
        return Mat(*self._matrix(n, 3))

    def f(self, n: int) -> Rows:
        """The matrix that a field names, as a factor for each row."""
        return Rows(*self._matrix(n, 2))

    l = field

    def i(self, n: int) -> Value:
        """The address of the matrix that a field names: whole numbers lie there."""
        return self._matrix(n, 1)[0]

    def ones(self) -> Rows:
        """Factors 1."""
        return Rows(self.e.get(self.matrices + ONE * 24, I64), 0)

    def number(self, matrix: int) -> Value:
        """The number of a matrix of one."""
        return self.e.get(self.e.get(self.matrices + matrix * 24, I64))

    def array(self, n: int, column: int) -> Value:
        """A column of the table of arrays, of the array that a field names."""
        return self.e.get(self.arrays + self.field(n) * 56 + 8 * column, I64)

    def address(self, n: int, token: Value, head: Value, batch: Value | None = None) -> Value:
        """Of a token's vector of one head; for states, of row `token` of state `batch`."""
        batch = self.e.get(self.registers + 8 * BATCH_OF_TASK, I64) if batch is None else batch
        shared = head // self.array(n, SHARED)
        return (self.array(n, AT) + batch * self.array(n, BATCH) + token * self.array(n, TOKEN)
                + shared * self.array(n, HEADS))  # fmt: skip

    def more(self, n: int, head: Value) -> Value:
        """Not 0 if a head before this one has written to the same place of the array."""
        return head % self.array(n, SHARED)


def simple(body: Callable[..., None], kinds: str) -> Callable[[Machine], None]:
    """An operation that is a routine: its operands by kind: registers r, matrices m, factors f, literals, places i."""
    return lambda t: body(t.e, *[getattr(t, kind)(n + 1) for n, kind in enumerate(kinds)])


def whole(formula: Callable[..., Value]) -> Callable[[Machine], None]:
    """Register a = formula of registers b and c."""
    return lambda t: t.e.put(formula(t.e, t.r(2), t.r(3)), t.at(1))


def _place(t: Machine) -> None:  # matrix, base, number, bytes apart
    to, (at, row, col) = t.matrices + t.field(1) * 24, t.m(2)
    for n, x in enumerate((at + t.r(3) * t.l(4), row, col)):
        t.e.put(x, to + 8 * n)


def _point(t: Machine) -> None:  # matrix, array, token, head, column
    to, at = t.matrices + t.field(1) * 24, t.address(2, t.r(3), t.r(4)) + t.r(5) * t.array(2, CHANNEL)
    for n, x in enumerate((at, t.array(2, TOKEN) // t.e.size, t.e.whole(1))):
        t.e.put(x, to + 8 * n)


def _load(t: Machine) -> None:  # matrix, array, token, head, rows, column, columns
    at = t.address(2, t.r(3), t.r(4)) + t.r(6) * t.array(2, CHANNEL)
    rows.load(t.e, t.m(1), t.r(5), t.r(7), t.array(2, STORAGE), at, t.array(2, TOKEN), t.array(2, CHANNEL))


def _expect_none(t: Machine) -> None:  # matrix
    at = t.f(1).at
    for register in (EXPECTED, EXPECTED_END):
        t.e.put(at, t.registers + 8 * register)


def _expect(t: Machine) -> None:  # array, token, stop, head, column, columns, at most so many rows
    step = t.array(1, CHANNEL)
    at = t.address(1, t.r(2), t.r(4)) + t.r(5) * step
    count = t.r(6) * t.e.least(step, t.e.size)  # of numbers farther apart only the first: there is no room for more
    rows.expect(t.e, t.registers + 8 * EXPECTED_END, t.e.least(t.r(7), t.r(3) - t.r(2)), count, at, t.array(1, TOKEN))


def _load_column(t: Machine) -> None:  # vector, array, token, head, rows
    out, at = t.m(1), t.address(2, t.r(3), t.r(4))
    step = t.array(2, TOKEN)
    rows.load(t.e, Mat(out.at, 0, 1), 1, t.r(5), t.array(2, STORAGE), at, 0, step)


def _state(t: Machine) -> None:  # matrix, array, state, head, rows, column, columns
    at = t.address(2, t.e.whole(0), t.r(4), t.r(3)) + t.r(6) * t.array(2, CHANNEL)
    rows.load(t.e, t.m(1), t.r(5), t.r(7), t.array(2, STORAGE), at, t.array(2, TOKEN), t.array(2, CHANNEL))


def _store_state(t: Machine) -> None:  # the same
    at = t.address(2, t.e.whole(0), t.r(4), t.r(3)) + t.r(6) * t.array(2, CHANNEL)
    rows.put(t.e, t.m(1), t.ones(), t.r(5), t.r(7), at, t.array(2, TOKEN), 0)


def _put(t: Machine) -> None:  # matrix, array, token, head, rows, columns, factors
    at = t.address(2, t.r(3), t.r(4))
    rows.put(t.e, t.m(1), t.f(7), t.r(5), t.r(6), at, t.array(2, TOKEN), t.more(2, t.r(4)))


def _product(t: Machine) -> None:  # half, A, B, m, n, k, rows, added, rows of added, out
    A, turned = t.m(2), (t.l(1) & TURNED).compare("!=", 0)
    A = Mat(A.at, t.e.select(turned, A.col, A.row), t.e.select(turned, A.row, A.col))
    tiles.product(t.e, t.l(1) & ~TURNED, A, t.m(3), t.r(4), t.r(5), t.r(6), t.f(7), t.m(8), t.f(9), t.m(10),
                  t.registers + 8 * EXPECTED)  # fmt: skip


def _pairs(t: Machine) -> None:  # array or -1, token, head, rows, float64 g, sums, E, start, end, carry
    e, m, g = t.e, t.r(4), t.f(5).at
    wide = e.wide()
    e.choose(
        (t.l(1) < 0, lambda: rows.clear(wide, Mat(g, 0, 1), 0, 1, m)),
        otherwise=lambda: rows.load(Emit(e.b, 64), Mat(g, 0, 1), 1, m, t.array(1, STORAGE),
                                    t.address(1, t.r(2), t.r(3)), 0, t.array(1, TOKEN)),
    )  # fmt: skip
    decay.pair_table(e, g, t.f(6).at, m, t.m(7), t.f(8), t.f(9), t.f(10))


def _crossings(t: Machine) -> None:  # array, token, head, rows, crossed, readers, writers, total, sums
    at, head = t.address(1, t.r(2), t.r(3)), t.r(3)
    decay_vjp.crossings(t.e, at, t.array(1, TOKEN), t.more(1, head), t.r(4), t.m(5), *map(t.f, range(6, 10)))


def _channel_gram(t: Machine) -> None:  # X, Y, gates, early, rows, K, out, near, far, far turned
    decay.channel_gram(t.e, t.m(1), t.m(2), t.m(3), t.l(4), t.r(5), t.r(6), *map(t.m, range(7, 11)), t.ones())


def _channel_pull(t: Machine) -> None:  # P, X, Y, gates, early, rows, K, dX, dY, crossed, scratch
    decay_vjp.channel_pull(t.e, *map(t.m, range(1, 5)), t.l(5), t.r(6), t.r(7), *map(t.m, range(8, 12)), t.ones())


def _channel_crossings(t: Machine) -> None:  # array, token, head, rows, K, crossed, readers, writers, total
    at, head = t.address(1, t.r(2), t.r(3)), t.r(3)
    decay_vjp.channel_crossings(t.e, at, t.array(1, TOKEN), t.more(1, head), t.r(4), t.r(5), *map(t.m, range(6, 9)),
                                t.f(9))  # fmt: skip


@routine
def _bonus(e: Emit, P: Mat, Q: Mat, K: Mat, u: Mat, m: Value, n: Value, scale: Rows) -> None:
    """P_ii = scale sum_d q_id u_d k_id"""
    with e.each(m) as i:
        total = e.variable(e.zero())
        with e.lanes(n) as d:
            mask = e.below(n - d)
            qu = e.load(e.address(Q, i, d), mask) * e.load(e.address(u, 0, d), mask)
            total.set(e.fma(qu, e.load(e.address(K, i, d), mask), total.get()))
        e.put(e.get(scale.at) * e.sum(total.get()), e.address(P, i, i))


@routine
def _bonus_pull(e: Emit, dP: Mat, Q: Mat, K: Mat, u: Mat, m: Value, n: Value, dQ: Mat, dK: Mat, dU: Mat,
                scale: Rows) -> None:  # fmt: skip
    """Its transpose, from s_i = scale dP_ii: dq += s u k, dk += s u q, du += s q k."""
    with e.each(m) as i:
        s = e.spread(e.get(scale.at) * e.get(e.address(dP, i, i)))
        with e.lanes(n) as d:
            q, k, factor = e.load(e.address(Q, i, d)), e.load(e.address(K, i, d)), s * e.load(e.address(u, 0, d))
            for to, x, y in ((e.address(dQ, i, d), factor, k), (e.address(dK, i, d), factor, q),
                             (e.address(dU, 0, d), s * q, k)):  # fmt: skip
                e.store(e.fma(x, y, e.load(to)), to)


def _rest(t: Machine) -> None:  # X, Y, P, rows, K, out, beta
    if t.e.bits == 32:
        decay.rest(t.e, t.m(1), t.m(2), t.m(3), t.r(4), t.r(5), t.m(6), t.f(7))


def _scale_of(t: Machine) -> Rows:
    return Rows(t.e.get(t.matrices + SCALE * 24, I64), 0)


WRITTEN: dict[str, Callable[[Machine], None]] = {
    "add": whole(lambda e, x, y: x + y),
    "minus": whole(lambda e, x, y: x - y),
    "least": whole(lambda e, x, y: e.least(x, y)),
    "times": whole(lambda e, x, y: x * y),
    "whole": whole(lambda e, x, _: (x + tiles.PAD - 1) // tiles.PAD * tiles.PAD),
    "place": _place,
    "point": _point,
    "load": _load,
    "expect": _expect,
    "expect_none": _expect_none,
    "load_column": _load_column,
    "state": _state,
    "store_state": _store_state,
    "put": _put,
    "clear": simple(rows.clear, "mrrr"),
    "copy": simple(rows.scaled, "mrrmf"),
    "product": _product,
    "solve": simple(tiles.solve_lower, "mmrr"),
    "solve_transposed": simple(tiles.solve_lower_transposed, "mmrr"),
    "transpose": simple(tiles.transpose, "mrrm"),
    "hadamard": simple(rows.times, "mmrrm"),
    "add_hadamard": simple(rows.add_times, "mmrrm"),
    "reach": simple(rows.reach, "fffrl"),
    "dots": lambda t: rows.add_dots(t.e, t.f(1), t.m(2), t.m(3), t.r(4), t.r(5), 0, t.l(6)),
    "dots_below": lambda t: rows.add_dots(t.e, t.f(1), t.m(2), t.m(3), t.r(4), t.r(5), 1, t.l(6)),
    "pairs": _pairs,
    "weigh": simple(decay.weigh, "mmrrlf"),
    "pull": simple(decay_vjp.pull, "mmmrlfm"),
    "crossings": _crossings,
    "overlap": simple(decay_vjp.overlap, "mmrrff"),
    "column_overlap": simple(decay_vjp.column_overlap, "mmrrf"),
    "channels": simple(decay.channel_tables, "mrrmmf"),
    "channel_gram": _channel_gram,
    "channel_pull": _channel_pull,
    "channel_crossings": _channel_crossings,
    "channel_overlap": simple(decay_vjp.channel_overlap, "mmrrff"),
    "bonus": lambda t: _bonus(t.e, *map(t.m, range(1, 5)), t.r(5), t.r(6), _scale_of(t)),
    "bonus_pull": lambda t: _bonus_pull(t.e, *map(t.m, range(1, 5)), t.r(5), t.r(6), *map(t.m, range(7, 10)),
                                        _scale_of(t)),
    "accumulate": simple(rows.accumulate, "mrrm"),
    "descend": lambda t: descend(t.e, *map(t.m, range(1, 5)), t.f(5), t.f(6), t.r(7), t.r(8), t.at(9)),
    "monomials": simple(maps.monomials, "mirfrrm"),
    "monomials_pull": simple(maps.monomials_pull, "mirfrrmmm"),
    "exponentials": simple(maps.exponentials, "mmrrrf"),
    "exponentials_pull": simple(maps.exponentials_pull, "mmrrff"),
    "waves": simple(maps.waves, "mrrfm"),
    "waves_pull": simple(maps.waves_pull, "mmrrm"),
    "inverse_lengths": simple(maps.inverse_lengths, "mrrf"),
    "unit_pull": simple(maps.unit_pull, "mrrfm"),
    "averages": simple(maps.averages, "mmfrrfffff"),
    "averages_pull": simple(maps.averages_pull, "mmfrrmf"),
    "rest": _rest,
    "any_above_one": lambda t: decay.any_above_one(t.e, t.f(2), t.r(3), t.at(1)),
}  # fmt: skip


@routine
def _task(e: Emit, code: Value, registers: Value, matrices: Value, arrays: Value) -> None:
    """One task: operations one after the other until `halt`."""
    b, now = e.b, e.variable(code)
    following, done = b.append_basic_block("operation"), b.append_basic_block("halt")
    b.branch(following)
    b.position_at_end(following)
    t = Machine(e, now.get(), registers, matrices, arrays)
    now.set(t.code + 8 * FIELDS)
    choice = b.switch(t.field(0).v, done)
    for name, n in OP.items():
        if name == "halt":
            continue
        block = b.append_basic_block(name)
        choice.add_case(n, block)
        b.position_at_end(block)
        if name == "less":  # register, register, number of the operation that follows if the first is less
            with e.when(t.r(1) < t.r(2)):
                now.set(code + t.l(3) * (8 * FIELDS))
        else:
            WRITTEN[name](t)
        b.branch(following)
    b.position_at_end(done)


@entry(numbers=2, wholes=7)
def carry_out(e: Emit, one: Value, scale: Value, code: Value, registers: Value, matrices: Value, arrays: Value,
              tasks: Value, first: Value, last: Value) -> None:  # fmt: skip
    """The program `code` for tasks first..last, rows of a table that fill the first registers; tables by address."""
    for matrix, x in ((ONE, one), (SCALE, scale), (MINUS, -one)):
        e.put(x, e.get(matrices + matrix * 24, I64))
    with e.each(last, start=first) as task:
        for n in range(INPUTS):
            e.put(e.get(tasks + (task * INPUTS + n) * 8, I64), registers + 8 * n)
        _task(e, code, registers, matrices, arrays)
