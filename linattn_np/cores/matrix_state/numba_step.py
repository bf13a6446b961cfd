"""The recurrent form: one token after the other, each in one pass over the state.

A task is one sequence, one head of the state and some of its value columns. With
S~ = diag(e^{g_t}) S_{t-1} diag(e^{gv_t})

    DELTA   w_t = beta_t (v_t - r_t S~)    (or r_t S_{t-1})     S_t = S~ + k_t^T w_t
    FREE    w_t = v_t, y_t = a_t S_{t-1}                        S_t = S~ + k_t^T w_t + b_t^T y_t
    out_t = scale q_t S_t     or     scale (q_t S_{t-1} + (q_t (.) u) k_t^T v_t)

the pass that makes S_t also reads it for everybody who reads S_t: q_t or q_{t+1}, and r_{t+1} with its own decay put
on its weights. So T tokens are T passes, after one that reads S_0, and one token is two: the first brings a block of
columns into the cache, the second finds it there. The state is read from where it lies and written to where it
belongs; between two tokens of a call it stays in a dense block.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ...pieces.numba_fetch import FIELDS, answer_row, copy_rows, error_row, exp_row, fetch, fill_rows, times_row
from ...pieces.numba_jit import kernel
from ...pieces.numba_stage import Int, Stage
from ...pieces.numba_state import NARROW, WIDE, Reader, State, Token, read_block, write_block
from ...pieces.numba_tiles import BYTES, I64
from ..numba_decay import NO_DECAY, VECTOR
from .numba_step_table import (
    BETA,
    BONUS,
    DECAYS,
    FADE,
    KEYS,
    NOTHING,
    PACKED,
    PUSHES,
    QUERY,
    READS,
    RECALLED,
    SEEN,
    TABLE,
    TOKENS,
    VALUES,
    WRITTEN,
    U,
)
from .numba_table import (
    ARRAYS,
    ASKED,
    AT,
    BATCH,
    BLOCKS,
    COLUMNS,
    DECAY,
    DELTA,
    DIRECT,
    EARLY_QUERY,
    EARLY_READ,
    ERASE,
    FREE,
    HEAD,
    HEADS,
    IN_BETA,
    IN_BONUS,
    IN_FADE,
    IN_G,
    IN_K,
    IN_PUSH,
    IN_Q,
    IN_READ,
    IN_STATE,
    IN_V,
    N_K,
    N_V,
    NO_ERASE,
    OUT,
    OUT_STATE,
    OWN_READ,
    QUERIES,
    STARTED,
    TOKEN,
    WITH_BONUS,
    WITH_FADE,
)


class _Call:
    """What every routine of the kernel is told: the tables' addresses, and where its own memory begins."""

    def __init__(self, s: Stage, arrays: Int, n: Int, w: Int, base: Int):
        self.s, self.arrays, self.n_at, self.w_at, self.base = s, arrays, n, w, base

    def passed(self) -> tuple[Int, ...]:
        return self.arrays, self.n_at, self.w_at, self.base

    def n(self, name: int) -> Int:
        """A size or kind of the call."""
        return self.s.field(self.n_at, name)

    def array(self, name: int, field: int) -> Int:
        return self.s.field(self.arrays, FIELDS * name + field)

    def at(self, name: int) -> Int:
        """A matrix of the task."""
        return self.base + self.s.field(self.w_at, 2 * name)

    def row(self, name: int) -> Int:
        """Bytes from one of its rows to the next."""
        return self.s.field(self.w_at, 2 * name + 1)

    def state(self, name: int, state: Int, head: Int, column: Int) -> State:
        """A head's state, from a column on, whose columns lie side by side."""
        at = self.array(name, AT) + state * self.array(name, BATCH) + head * self.array(name, HEAD)
        return State(at + column * self.s.size, self.array(name, TOKEN))


def _load_slab(s: Stage, arrays, n, w, base, batch, head, t, c) -> None:
    """The K-wide vectors of c tokens from t on, as the passes take them."""
    call = _Call(s, arrays, n, w, base)
    K, row, keys, decays, reads = call.n(N_K), call.row(KEYS), call.at(KEYS), call.at(DECAYS), call.at(READS)
    decay, erase, per = call.n(DECAY), call.n(ERASE), call.n(QUERIES)
    fetch(s, arrays, IN_K, batch, t, head, 0, c, K, keys, row)
    with s.when(decay == NO_DECAY):
        fill_rows(s, 1.0, decays, 0, 1, 1)
    with s.when(decay != NO_DECAY):  # e^g
        width = s.choose(decay == VECTOR, K, 1)
        fetch(s, arrays, IN_G, batch, t, head, 0, c, width, decays, row)
        with s.each(0, c) as i:
            exp_row(s, decays + i * row, width)
    with s.when(erase != NO_ERASE):  # r or a, times e^g where r reads the decayed state
        with s.when(call.n(OWN_READ) != 0):
            fetch(s, arrays, IN_READ, batch, t, head, 0, c, K, reads, row)
        with s.when(call.n(OWN_READ) == 0):
            copy_rows(s, keys, row, reads, row, c, K)
        with s.when((call.n(EARLY_READ) == 0) & (decay != NO_DECAY)), s.each(0, c) as i:
            times_row(s, reads + i * row, decays + i * row, s.choose(decay == VECTOR, 1, 0), K)
    with s.when(erase == DELTA):
        fetch(s, arrays, IN_BETA, batch, t, head, 0, c, 1, call.at(BETA), s.size)
    with s.when(erase == FREE):
        fetch(s, arrays, IN_PUSH, batch, t, head, 0, c, K, call.at(PUSHES), row)
    with s.when(call.n(ASKED) != 0), s.each(0, per) as j:
        fetch(s, arrays, IN_Q, batch, t, head * per + j, 0, c, K, call.at(QUERY) + j * row, row * per)
    with s.when(call.n(WITH_BONUS) != 0):
        fetch(s, arrays, IN_BONUS, 0, 0, head, 0, 1, K, call.at(U), row)
        with s.each(0, c * per) as i:
            query, key = call.at(QUERY) + i * row, keys + i // per * row
            _put_bonus(s, query, call.at(U), key, K, call.at(BONUS) + i * s.size)


def _put_bonus(s: Stage, q, u, k, K, out) -> None:
    """out = (q (.) u) k^T"""
    s.put(ir.Constant(s.F, 0.0), out)
    with s.each(0, K) as d:
        q_d, u_d, k_d = (s.get(x + d * s.size) for x in (q, u, k))
        s.put(s.b.fadd(s.get(out), s.b.fmul(s.b.fmul(q_d, u_d), k_d)), out)


def _answer(s: Stage, arrays, n, w, base, at, row, following, wide, first, batch, head, t, i, column, V, scale) -> None:
    """out_t = scale (q_t S + bonus v) for token t, i of its slab; its first query has read S already if first = 1."""
    call, S = _Call(s, arrays, n, w, base), State(at, row)
    per, seen, with_bonus = call.n(QUERIES), call.at(SEEN), call.n(WITH_BONUS) != 0
    with s.each(0, per) as j:
        x = i * per + j
        with s.when(j >= first):
            _read(s, wide, S, Reader(call.at(QUERY) + x * call.row(QUERY), seen), following, call.n(N_K))
        bonus = s.get(s.choose(with_bonus, call.at(BONUS) + x * s.size, call.at(NOTHING)))
        answer_row(s, scale, seen, bonus, s.choose(with_bonus, call.at(VALUES), call.at(NOTHING)), V)
        out = call.array(OUT, AT) + batch * call.array(OUT, BATCH) + t * call.array(OUT, TOKEN)
        out = out + (head * per + j) * call.array(OUT, HEAD) + column * s.size
        copy_rows(s, seen, 0, out, 0, 1, V)


def _read(s: Stage, wide: Int, S: State, reader: Reader, following: Int, K: Int) -> None:
    for lanes, condition in ((WIDE, wide != 0), (NARROW, wide == 0)):
        with s.when(condition):
            read_block(s, lanes, S, reader, following, K)


def _write(s: Stage, call: _Call, wide: Int, S: State, to: State, token: Token, q: Reader, r: Reader, last, following):
    """The pass that is the call's; behind the last token nobody reads with r."""
    K, fades, erase = call.n(N_K), call.n(WITH_FADE) != 0, call.n(ERASE)
    alone = (erase == NO_ERASE) | ((erase == DELTA) & last)
    kinds = ((fades, [q], True, False), (alone & ~fades, [q], False, False),
             ((erase == DELTA) & ~last, [q, r], False, False), ((erase == FREE) & last, [q], False, True),
             ((erase == FREE) & ~last, [q, r], False, True))  # fmt: skip
    for lanes, is_wide in ((WIDE, wide != 0), (NARROW, wide == 0)):
        for condition, readers, fade, push in kinds:
            with s.when(is_wide & condition):
                write_block(s, lanes, S, to, token, readers, following, K, fade, push)


def _walk_block(s: Stage, arrays, n, w, base, begin, begin_row, end, end_row, following, wide, batch, head, t, c,
                column, V, scale) -> None:  # fmt: skip
    """c tokens from t on over V columns, a block at most, from the state at `begin` to `end`."""
    call = _Call(s, arrays, n, w, base)
    K, row, erase, per = call.n(N_K), call.row(KEYS), call.n(ERASE), call.n(QUERIES)
    nobody, recalled, seen, values = call.at(NOTHING), call.at(RECALLED), call.at(SEEN), call.at(VALUES)
    asked, early = call.n(ASKED) != 0, call.n(EARLY_QUERY) != 0
    early, late = asked & early, asked & ~early
    written = s.choose(erase == DELTA, call.at(WRITTEN), values)
    with s.when(erase != NO_ERASE):
        _read(s, wide, State(begin, begin_row), Reader(call.at(READS), recalled), following, K)
    with s.each(0, c) as i:
        first, last = i == 0, i + 1 == c
        S = State(s.choose(first, begin, call.at(PACKED)), s.choose(first, begin_row, call.row(PACKED)))
        to = State(s.choose(last, end, call.at(PACKED)), s.choose(last, end_row, call.row(PACKED)))
        fetch(s, arrays, IN_V, batch, t + i, head, column, 1, V, values, 0)
        with s.when(erase == DELTA):  # w = beta (v - recalled)
            error_row(s, s.get(call.at(BETA) + i * s.size), values, recalled, written, V)
        with s.when(call.n(WITH_FADE) != 0):
            fetch(s, arrays, IN_FADE, batch, t + i, head, column, 1, V, call.at(FADE), 0)
            exp_row(s, call.at(FADE), V)
        rest = (following, wide, s.choose(early & first, 0, 1), batch, head, t + i, i, column, V)
        with s.when(early):
            s.routine("answer", _answer, *call.passed(), *S, *rest, number=scale)
        q = s.choose(late, i, i + 1)  # who reads S_t: this token's query, or the next one's
        q = s.choose(late | (early & (i + 1 < c)), call.at(QUERY) + q * per * row, nobody)
        r = s.choose(last, nobody, call.at(READS) + (i + 1) * row)
        decays = call.at(DECAYS) + s.choose(call.n(DECAY) == NO_DECAY, 0, i) * row
        token = Token(decays, s.choose(call.n(DECAY) == VECTOR, s.size, 0), call.at(FADE), call.at(KEYS) + i * row,
                      written, call.at(PUSHES) + i * row, recalled)  # fmt: skip
        _write(s, call, wide, S, to, token, Reader(q, seen), Reader(r, recalled), last, following)
        with s.when(late):
            s.routine("answer", _answer, *call.passed(), *to, *rest, number=scale)


def _block(s: Stage, arrays, n, w, base, state, batch, head, begins, t, c, column, V, wide, scale) -> None:
    """c tokens over one block, from where the state lies, or a copy, or zeros, to where it belongs."""
    call = _Call(s, arrays, n, w, base)
    K, columns = call.n(N_K), s.choose(wide != 0, WIDE * BYTES // s.size, NARROW * BYTES // s.size)
    whole, begins, started = columns == V, begins != 0, call.n(STARTED) != 0
    packed, final = State(call.at(PACKED), call.row(PACKED)), call.state(OUT_STATE, state, head, column)
    initial = call.state(IN_STATE, state, head, column)
    there = State(*(s.choose(begins, x, y) for x, y in zip(initial, final, strict=True)))
    usable = whole & (~begins | (started & (call.n(DIRECT) != 0)))
    begin = State(*(s.choose(usable, x, y) for x, y in zip(there, packed, strict=True)))
    end = State(*(s.choose(whole, x, y) for x, y in zip(final, packed, strict=True)))
    with s.when(~usable):
        with s.when(begins & started):
            fetch(s, arrays, IN_STATE, state, 0, head, column, K, V, *packed)
        with s.when(begins & ~started):
            fill_rows(s, 0.0, *packed, K, columns)
        with s.when(~begins):
            copy_rows(s, *final, *packed, K, V)
    following = begin.at + K * begin.row + (K - 1) * column * s.size  # of the next head as much as of this one is done
    with s.when(c != 0):
        s.routine("walk", _walk_block, *call.passed(), *begin, *end, following, wide, batch, head, t, c, column, V,
                  number=scale)  # fmt: skip
    made = State(*(s.choose(c == 0, x, y) for x, y in zip(begin, end, strict=True)))
    with s.when(made.at != final.at):
        copy_rows(s, *made, *final, K, V)


def _walk(s: Stage, arrays, n, w, base, sequence, head, first_column, scale) -> None:
    """A sequence: its tokens slab by slab, its columns block by block: wide ones while they last."""
    call = _Call(s, arrays, n, w, base)
    batch, start, stop, state = (s.field(sequence, i) for i in range(4))
    last_column = s.least(first_column + call.n(COLUMNS), call.n(N_V))
    with s.each(start, s.choose(stop == start, start + 1, stop), TOKENS) as t:
        c = s.least(TOKENS, stop - t)
        with s.when(c != 0):
            s.routine("slab", _load_slab, *call.passed(), batch, head, t, c)
        wide, narrow = WIDE * BYTES // s.size, NARROW * BYTES // s.size
        between = first_column + ((last_column - first_column) & -wide)
        told = (*call.passed(), state, batch, head, s.choose(t == start, 1, 0), t, c)
        with s.each(first_column, between, wide) as column:
            s.routine("block", _block, *told, column, wide, 1, number=scale)
        with s.each(between, last_column, narrow) as column:
            V = s.least(narrow, last_column - column)
            s.routine("block", _block, *told, column, V, 0, number=scale)


def _describe(s: Stage, call: _Call, sources: Int, handles: Int, count: Int) -> Int:
    """Fill the own copy of the table of arrays; whether what is overwritten shares memory with what is read.

    sources: a row for each array of the table: the handle where its address is found (-1: in the table), and for each
    handle the first byte and the one after the last, from the address on. The last handle is the one overwritten.
    """
    b, table = s.b, call.at(TABLE)
    with s.each(0, ARRAYS * FIELDS) as i:
        s.put_field(s.field(call.arrays, i), table, i)
    with s.each(0, ARRAYS) as i:
        source, at = s.field(sources, i), i * FIELDS
        with s.when(source >= 0):
            s.put_field(s.field(table, at) + s.field(s.field(handles, source), 0), table, at)
    clash = b.alloca(I64)
    b.store(s.const(0), clash)
    extents, mine = sources + 8 * ARRAYS, s.field(s.field(handles, count), 0)
    low, high = (mine + s.field(extents, count * 2 + i) for i in range(2))
    with s.each(0, count) as i:
        first, last = (s.field(s.field(handles, i), 0) + s.field(extents, i * 2 + j) for j in range(2))
        shared = (first < high) & (low < last)
        b.store(b.or_(b.load(clash), b.zext(shared.value, I64)), clash)
    return s.int(b.load(clash))


@intrinsic
def _tasks(context, one, scale, arrays, sources, handles, count, n, sequences, w, base, first, last):
    def emit(context, b, signature, given):
        s = Stage(b, signature.args[0])
        arrays, sources, handles, count, n, sequences, w, base, first, last = (s.int(x) for x in given[2:])
        call = _Call(s, arrays, n, w, base)
        clash = _describe(s, call, sources, handles, count)
        call = _Call(s, call.at(TABLE), n, w, base)
        fill_rows(s, 0.0, call.at(NOTHING), 0, 1, call.row(NOTHING) // s.size)
        with s.when(clash == 0), s.each(first, last) as task:
            state, column = task // call.n(BLOCKS), task % call.n(BLOCKS) * call.n(COLUMNS)
            sequence, head = sequences + state // call.n(HEADS) * 32, state % call.n(HEADS)
            s.routine("sequence", _walk, *call.passed(), sequence, head, column, number=given[1])
        return clash.value

    return types.int64(one, one, *[types.int64] * 10), emit


@kernel
def step_tasks(one, scale, arrays, sources, handles, count, n, sequences, w, base, first, last):
    """Tasks first..last of (sequence, head, column block), the last running fastest, in memory from `base` on.

    Of the tables the kernel gets the addresses. Returns 1, and does nothing, where the state that is overwritten
    shares memory with one of the `count` arrays that are read.
    """
    return _tasks(one, scale, arrays, sources, handles, count, n, sequences, w, base, first, last)
