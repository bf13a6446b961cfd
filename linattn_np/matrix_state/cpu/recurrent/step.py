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

from ....runtime.compiled import rows as rows
from ....runtime.compiled.code import entry
from ....runtime.compiled.emit import I64, Emit, Mat, Rows, Value, routine
from ....runtime.compiled.lanes import exp
from ....runtime.compiled.state import NARROW, READ, WIDE, WRITE, Reader, State, Token
from ..interpreter.machine import AT, BATCH, CHANNEL, SHARED, STORAGE, TOKEN
from ..interpreter.machine import HEADS as HEAD
from ..interpreter.program import INPUTS
from ..table import (
    ARRAYS,
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
    OUT,
    OUT_STATE,
)
from .step_table import (
    ASKED,
    BETA,
    BLOCKS,
    BONUS,
    COLUMNS,
    CONSTANTS,
    DECAY,
    DECAYS,
    DELTA,
    DIRECT,
    EARLY_QUERY,
    EARLY_READ,
    ERASE,
    FADE,
    FIELDS,
    FREE,
    HEADS,
    KEYS,
    N_K,
    N_V,
    NO_DECAY,
    NO_ERASE,
    NOTHING,
    OWN_READ,
    PACKED,
    PUSHES,
    QUERIES,
    QUERY,
    READS,
    RECALLED,
    SEEN,
    STARTED,
    TABLE,
    TOKENS,
    VALUES,
    VECTOR,
    WITH_BONUS,
    WITH_FADE,
    WRITTEN,
    U,
)

SEQUENCE = 8 * INPUTS  # bytes of a row of the table of sequences


class _Call:
    """What every routine of the kernel is told: the addresses of the tables, and where its own memory begins."""

    def __init__(self, e: Emit, arrays: Value, n: Value, w: Value, base: Value):
        self.e, self.tables = e, (arrays, n, w, base)

    def _entry(self, table: Value, i: int) -> Value:
        return self.e.get(table + 8 * i, I64)

    def n(self, name: int) -> Value:
        """A size or kind of the call."""
        return self._entry(self.tables[1], name)

    def is_(self, name: int) -> Value:
        """Whether it is so."""
        return self.n(name).compare("!=", 0)

    def array(self, name: int, column: int) -> Value:
        """A column of the table of arrays."""
        return self._entry(self.tables[0], FIELDS * name + column)

    def at(self, name: int) -> Value:
        """Address of a matrix of its own."""
        return self.tables[3] + self._entry(self.tables[2], 2 * name)

    def row(self, name: int) -> Value:
        """Bytes from one of its rows to the next."""
        return self._entry(self.tables[2], 2 * name + 1)

    def mat(self, name: int) -> Mat:
        """The matrix."""
        return Mat(self.at(name), self.row(name) // self.e.size, 1)

    def token(self, name: int, batch: Value, token: Value, head: Value) -> Value:
        """Address of a token's vector of one head; of states, of row `token` of state `batch`."""
        at = self.array(name, AT) + batch * self.array(name, BATCH) + token * self.array(name, TOKEN)
        return at + head // self.array(name, SHARED) * self.array(name, HEAD)

    def load(self, name: int, batch, token, head, column, m, n, out: Mat) -> None:
        """out (m, n) from m tokens of an array, columns from `column` on."""
        at = self.token(name, batch, token, head) + self.array(name, CHANNEL) * column
        rows.load(self.e, out, m, n, self.array(name, STORAGE), at, self.array(name, TOKEN), self.array(name, CHANNEL))

    def state(self, name: int, state: Value, head: Value, column: Value) -> State:
        """A head's state from a column on, whose columns lie side by side."""
        zero = self.e.whole(0)
        return State(self.token(name, state, zero, head) + column * self.e.size, self.array(name, TOKEN))

    def constant(self, i: int) -> Rows:
        """1, or the queries' scale, for every row."""
        return Rows(self.at(CONSTANTS) + i * self.e.size, 0)


def _either(e: Emit, truth: Value, x: State, y: State) -> State:
    return State(*(e.select(truth, a, b) for a, b in zip(x, y, strict=True)))


@routine
def _exp_rows(e: Emit, X: Mat, m: Value, n: Value) -> None:
    """X <- e^X"""
    with e.each(m) as i, e.lanes(n) as j:
        at = e.address(X, i, j)
        e.store(exp(e, e.load(at)), at)


@routine
def _step_slab(e: Emit, arrays: Value, n: Value, w: Value, base: Value, batch: Value, head: Value, t: Value,
               c: Value) -> None:  # fmt: skip
    """The K-wide vectors of c tokens from t on, as the passes take them."""
    call = _Call(e, arrays, n, w, base)
    K, keys, decays, reads, queries = call.n(N_K), *(call.mat(x) for x in (KEYS, DECAYS, READS, QUERY))
    decay, erase, per, ones = call.n(DECAY), call.n(ERASE), call.n(QUERIES), call.constant(0)
    channels, fades = decay.equals(VECTOR), ~decay.equals(NO_DECAY)
    call.load(IN_K, batch, t, head, 0, c, K, keys)
    with e.when(~fades):
        e.put(e.number(1), decays.at)
    with e.when(fades):  # e^g
        width = e.select(channels, K, 1)
        call.load(IN_G, batch, t, head, 0, c, width, decays)
        _exp_rows(e, decays, c, width)
    with e.when(~erase.equals(NO_ERASE)):  # r or a, times e^g where r reads the decayed state
        with e.when(call.is_(OWN_READ)):
            call.load(IN_READ, batch, t, head, 0, c, K, reads)
        with e.when(~call.is_(OWN_READ)):
            rows.scaled(e, keys, c, K, reads, ones)
        late = fades & ~call.is_(EARLY_READ)
        with e.when(late & channels):
            rows.times(e, reads, decays, c, K, reads)
        with e.when(late & ~channels):
            rows.scaled(e, reads, c, K, reads, Rows(decays.at, decays.row))
    with e.when(erase.equals(DELTA)):
        at, step = call.token(IN_BETA, batch, t, head), call.array(IN_BETA, TOKEN)
        rows.load(e, Mat(call.at(BETA), 0, 1), 1, c, call.array(IN_BETA, STORAGE), at, 0, step)
    with e.when(erase.equals(FREE)):
        call.load(IN_PUSH, batch, t, head, 0, c, K, call.mat(PUSHES))
    with e.when(call.is_(ASKED)), e.each(per) as j:
        out = Mat(e.address(queries, j), queries.row * per, 1)
        call.load(IN_Q, batch, t, head * per + j, 0, c, K, out)
    with e.when(call.is_(WITH_BONUS)):  # (q (.) u) k^T
        u = call.at(U)
        call.load(IN_BONUS, e.whole(0), e.whole(0), head, 0, 1, K, call.mat(U))
        with e.each(c * per) as i:
            q, k, total = e.address(queries, i), e.address(keys, i // per), e.variable(e.number(0))
            with e.each(K) as d:
                q_d, u_d, k_d = (e.get(x + d * e.size) for x in (q, u, k))
                total.set(total.get() + q_d * u_d * k_d)
            e.put(total.get(), call.at(BONUS) + i * e.size)


def _read(e: Emit, wide: Value, S: State, reader: Reader, following: Value, K: Value) -> None:
    e.choose((wide, lambda: READ[WIDE](e, *S, *reader, following, K)),
             otherwise=lambda: READ[NARROW](e, *S, *reader, following, K))  # fmt: skip


@routine
def _step_answer(e: Emit, arrays: Value, n: Value, w: Value, base: Value, at: Value, row: Value, following: Value,
                 wide: Value, first: Value, batch: Value, head: Value, t: Value, i: Value, column: Value,
                 V: Value) -> None:  # fmt: skip
    """out_t = scale (q_t S + bonus v) for token t, i of its slab; its first query has read S already if first = 1."""
    call = _Call(e, arrays, n, w, base)
    per, seen, values = call.n(QUERIES), call.at(SEEN), call.at(VALUES)
    with e.each(per) as j:
        x = i * per + j
        with e.when(first <= j):
            reader = Reader(call.at(QUERY) + x * call.row(QUERY), seen)
            _read(e, wide.compare("!=", 0), State(at, row), reader, following, call.n(N_K))
        with e.when(call.is_(WITH_BONUS)):
            bonus = e.spread(e.get(call.at(BONUS) + x * e.size))
            with e.lanes(V) as d:
                at_d = seen + d * e.size
                e.store(e.fma(bonus, e.load(values + d * e.size), e.load(at_d)), at_d)
        out = call.token(OUT, batch, t, head * per + j) + column * e.size
        rows.put(e, Mat(seen, 0, 1), call.constant(1), 1, V, out, 0, 0)


def _write(e: Emit, call: _Call, wide: Value, S: State, to: State, token: Token, q: Reader, r: Reader, last: Value,
           following: Value) -> None:  # fmt: skip
    """The pass that is the call's; behind the last token nobody reads with r."""
    K, erase = call.n(N_K), call.n(ERASE)

    def by_width(*kind):
        written = (*S, *to, *token, *q, *r, following, K)
        return lambda: e.choose((wide, lambda: WRITE[WIDE, *kind](e, *written)),
                                otherwise=lambda: WRITE[NARROW, *kind](e, *written))  # fmt: skip

    e.choose(
        (call.is_(WITH_FADE), by_width(1, True, False)),
        (erase.equals(FREE) & last, by_width(1, False, True)),
        (erase.equals(FREE), by_width(2, False, True)),
        (erase.equals(NO_ERASE) | last, by_width(1, False, False)),
        otherwise=by_width(2, False, False),
    )


@routine
def _step_walk(e: Emit, arrays: Value, n: Value, w: Value, base: Value, begin: Value, begin_row: Value, end: Value,
               end_row: Value, following: Value, wide: Value, batch: Value, head: Value, t: Value, c: Value,
               column: Value, V: Value) -> None:  # fmt: skip
    """c tokens from t on over V columns, a block at most, from the state at `begin` to `end`."""
    call, is_wide = _Call(e, arrays, n, w, base), wide.compare("!=", 0)
    K, row, erase, per = call.n(N_K), call.row(KEYS), call.n(ERASE), call.n(QUERIES)
    nobody, recalled, seen, values = (call.at(x) for x in (NOTHING, RECALLED, SEEN, VALUES))
    early, late = call.is_(ASKED) & call.is_(EARLY_QUERY), call.is_(ASKED) & ~call.is_(EARLY_QUERY)
    written = e.select(erase.equals(DELTA), call.at(WRITTEN), values)
    initial, final, inside = State(begin, begin_row), State(end, end_row), State(call.at(PACKED), call.row(PACKED))
    with e.when(~erase.equals(NO_ERASE)):
        _read(e, is_wide, initial, Reader(call.at(READS), recalled), following, K)
    with e.each(c) as i:
        first, last = i.equals(0), (i + 1).equals(c)
        S, to = _either(e, first, initial, inside), _either(e, last, final, inside)
        call.load(IN_V, batch, t + i, head, column, 1, V, call.mat(VALUES))
        with e.when(erase.equals(DELTA)):  # w = beta (v - recalled)
            beta = e.spread(e.get(call.at(BETA) + i * e.size))
            with e.lanes(V) as d:
                error = e.load(values + d * e.size) - e.load(recalled + d * e.size)
                e.store(beta * error, written + d * e.size)
        with e.when(call.is_(WITH_FADE)):
            call.load(IN_FADE, batch, t + i, head, column, 1, V, call.mat(FADE))
            _exp_rows(e, call.mat(FADE), 1, V)
        asked = (following, wide, e.select(early & first, e.whole(0), 1), batch, head, t + i, i, column, V)
        with e.when(early):
            _step_answer(e, *call.tables, *S, *asked)
        q = e.select(late, i, i + 1)  # who reads S_t: this token's query, or the next one's
        q = e.select(late | (early & ~last), call.at(QUERY) + q * per * row, nobody)
        r = e.select(last, nobody, call.at(READS) + (i + 1) * row)
        decays = call.at(DECAYS) + e.select(call.n(DECAY).equals(NO_DECAY), 0, i) * row
        token = Token(decays, e.select(call.n(DECAY).equals(VECTOR), e.whole(e.size), 0), call.at(FADE),
                      call.at(KEYS) + i * row, written, call.at(PUSHES) + i * row, recalled)  # fmt: skip
        _write(e, call, is_wide, S, to, token, Reader(q, seen), Reader(r, recalled), last, following)
        with e.when(late):
            _step_answer(e, *call.tables, *to, *asked)


@routine
def _step_block(e: Emit, arrays: Value, n: Value, w: Value, base: Value, state: Value, batch: Value, head: Value,
                begins: Value, t: Value, c: Value, column: Value, V: Value, wide: Value) -> None:  # fmt: skip
    """c tokens over one block, from where the state lies, or a copy, or zeros, to where it belongs."""
    call, K = _Call(e, arrays, n, w, base), _Call(e, arrays, n, w, base).n(N_K)
    columns = e.select(wide.equals(1), e.whole(WIDE * e.W), NARROW * e.W)
    whole, begins, started = V.equals(columns), begins.equals(1), call.is_(STARTED)
    packed, final = State(call.at(PACKED), call.row(PACKED)), call.state(OUT_STATE, state, head, column)
    there = _either(e, begins, call.state(IN_STATE, state, head, column), final)
    usable = whole & (~begins | (started & call.is_(DIRECT)))
    begin, end, copy = _either(e, usable, there, packed), _either(e, whole, final, packed), call.mat(PACKED)
    with e.when(~usable):
        e.choose(
            (begins & started, lambda: call.load(IN_STATE, state, e.whole(0), head, column, K, V, copy)),
            (begins, lambda: rows.clear(e, copy, 0, K, columns)),
            otherwise=lambda: call.load(OUT_STATE, state, e.whole(0), head, column, K, V, copy),
        )
    following = begin.at + K * begin.row + (K - 1) * column * e.size  # of the next head as much as of this is done
    with e.when(~c.equals(0)):
        _step_walk(e, *call.tables, *begin, *end, following, wide, batch, head, t, c, column, V)
    made = _either(e, c.equals(0), begin, end)
    with e.when(~made.at.equals(final.at)), e.each(K) as k:
        x = Mat(made.at + k * made.row, 0, 1)
        rows.put(e, x, call.constant(0), 1, V, final.at + k * final.row, 0, 0)


@routine
def _step_sequence(e: Emit, arrays: Value, n: Value, w: Value, base: Value, sequence: Value, head: Value,
                   first_column: Value) -> None:  # fmt: skip
    """A sequence: its tokens slab by slab, its columns block by block: wide ones while they last."""
    call = _Call(e, arrays, n, w, base)
    batch, start, stop, state = (e.get(sequence + 8 * i, I64) for i in range(4))
    last_column = e.least(first_column + call.n(COLUMNS), call.n(N_V))
    with e.each(e.select(stop.equals(start), start + 1, stop), start=start, step=TOKENS) as t:
        c = e.least(stop - t, TOKENS)
        with e.when(~c.equals(0)):
            _step_slab(e, *call.tables, batch, head, t, c)
        between = first_column + (last_column - first_column) // (WIDE * e.W) * (WIDE * e.W)
        told = (*call.tables, state, batch, head, e.select(t.equals(start), e.whole(1), 0), t, c)
        with e.each(between, start=first_column, step=WIDE * e.W) as column:
            _step_block(e, *told, column, WIDE * e.W, 1)
        with e.each(last_column, start=between, step=NARROW * e.W) as column:
            _step_block(e, *told, column, e.least(last_column - column, NARROW * e.W), 0)


def _describe(e: Emit, call: _Call, sources: Value, handles: Value, count: Value) -> Value:
    """Fill the own copy of the table of arrays; 1 if what is overwritten shares memory with what is read.

    sources: for each array of the table the handle that says where it lies (-1: the table does), then for each handle
    the first byte and the one after the last, from its address on. handles: addresses of addresses; the one after
    `count` is what is overwritten.
    """
    table, clash = call.at(TABLE), e.variable(e.whole(0))
    handle = lambda i: e.get(e.get(handles + i * 8, I64), I64)  # noqa: E731
    with e.each(ARRAYS * FIELDS) as i:
        e.put(e.get(call.tables[0] + i * 8, I64), table + i * 8)
    with e.each(ARRAYS) as i:
        source = e.get(sources + i * 8, I64)
        with e.when(source > -1):
            e.put(handle(source), table + i * (8 * FIELDS))
    extent = lambda i: [handle(i) + e.get(sources + (i * 2 + (ARRAYS + j)) * 8, I64) for j in range(2)]  # noqa: E731
    low, high = extent(count)
    with e.each(count) as i:
        first, last = extent(i)
        with e.when((first < high) & (low < last)):
            clash.set(e.whole(1))
    return clash.get()


@entry(numbers=0, wholes=5)
def step_tasks(e: Emit, tables: Value, handles: Value, base: Value, first: Value, last: Value) -> None:
    """Tasks first..last of (sequence, head, column block), the last running fastest, in memory from `base` on.

    tables: addresses of the tables of arrays, of sources, of sizes, of sequences, of the own matrices, and of the
    scale; how many arrays are read, and how many handles there are. Where the state that is overwritten shares memory
    with one of the arrays that are read, it does nothing but write 1 behind the handles.
    """
    arrays, sources, n, sequences, w, scale, count, behind = (e.get(tables + 8 * i, I64) for i in range(8))
    call = _Call(e, arrays, n, w, base)
    clash = _describe(e, call, sources, handles, count)
    with e.when(clash.equals(1)):
        e.put(clash, handles + behind * 8)
    call = _Call(e, call.at(TABLE), n, w, base)
    for i, x in enumerate((e.number(1), e.get(scale))):
        e.put(x, call.constant(i).at)
    rows.clear(e, call.mat(NOTHING), 0, 1, call.row(NOTHING) // e.size)
    with e.when(clash.equals(0)), e.each(last, start=first) as task:
        state, column = task // call.n(BLOCKS), task % call.n(BLOCKS) * call.n(COLUMNS)
        sequence = sequences + state // call.n(HEADS) * SEQUENCE
        _step_sequence(e, *call.tables, sequence, state % call.n(HEADS), column)
