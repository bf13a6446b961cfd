"""What cores/decay.py says, for one chunk in registers: tables of e^s, and grams.

Scalar decay (none: g = 0) has E_ij = e^{s(j, i)} by sums of its own terms in float64; "up to i - 1" is the table one
row earlier, where no j is left for the first row. Vector decay has products of its own
factors e^{g}, each <= 1, in sub-blocks of 16 tokens whose pairs meet at the first row of the later block.
"""

from __future__ import annotations

from llvmlite import ir

from ...runtime.compiled.emit import DOUBLE, Emit, Mat, Rows, Value, routine
from ...runtime.compiled.lanes import exp, smallest_normal
from ...runtime.compiled.rows import clear, dot, times
from ...runtime.compiled.tiles import FULL, product, transpose

BLOCK = 16
GATE_FLOOR = -1.0e4  # a log decay below it means the same as -inf, and sums of it stay finite


@routine
def pair_table(e: Emit, g: Value, sums: Value, m: Value, E: Mat, start: Rows, end: Rows, carry: Rows) -> None:
    """E_ij = e^{s(j, i)} for j <= i, start_i = e^{s(start, i - 1)}, end_j = e^{s(j, end)}, carry = start_m from g[:m].

    g: address of float64 log decays; sums: of s(j, i), a float64 for each j, of the row i that has been reached.
    """
    wide = e.wide()
    so_far = e.variable(Value(e, ir.Constant(DOUBLE, 0.0)))
    narrow = lambda x: x if e.bits == 64 else Value(e, e.b.fptrunc(x.v, e.V if isinstance(x.v.type, ir.VectorType) else e.F))  # noqa: E501, E731
    with e.lanes(m) as j:
        wide.store(Value(e, ir.Constant(wide.V, [0.0] * e.W)), sums + j * 8)
    with e.each(m) as i:
        g_i = e.get(g + i * 8, DOUBLE)
        g_i = e.select(g_i < GATE_FLOOR, GATE_FLOOR, g_i)
        with e.lanes(i + 1) as j:
            at, added = sums + j * 8, wide.spread(g_i)
            s = wide.load(at) + e.select(e.below(i - j), added, 0.0)
            wide.store(s, at)
            e.store(exp(e, narrow(s)), e.address(E, i, j))
        e.put(narrow(so_far.get()), start.at + i * e.size)
        so_far.set(so_far.get() + g_i)
    e.put(narrow(so_far.get()), start.at + m * e.size)
    with e.lanes(m + 1) as j:
        at = start.at + j * e.size
        e.store(exp(e, e.load(at)), at)
    e.put(e.get(start.at + m * e.size), carry.at)
    with e.lanes(m) as j:
        e.store(e.load(e.address(E, m - 1, j)), end.at + j * e.size)


@routine
def channel_tables(e: Emit, W: Mat, m: Value, K: Value, start: Mat, end: Mat, carry: Rows) -> None:
    """W <- e^W (m, K); start_i = W_0 ... W_i with a row of ones before it, end_j = W_{j + 1} ... W_{m - 1}.

    carry (K, 1): the last of start.
    """
    one = e.spread(e.number(1))
    with e.lanes(K) as d:
        p = e.variable(one)
        e.store(one, e.address(start, -1, d))
        with e.each(m) as i:
            at = e.address(W, i, d)
            w = exp(e, e.load(at))
            e.store(w, at)
            p.set(_faded(e, p.get(), w))
            e.store(p.get(), e.address(start, i, d))
        e.store(p.get(), carry.at + d * e.size)
        p.set(one)
        with e.each(m, down=True) as i:
            e.store(p.get(), e.address(end, i, d))
            p.set(_faded(e, p.get(), e.load(e.address(W, i, d))))


def _faded(e: Emit, x: Value, w: Value) -> Value:
    """x (.) w, both >= 0; 0 where it would be subnormal, which processors multiply slowly; NaN stays."""
    y = x * w
    return e.select(y < smallest_normal(e.bits), 0.0, y)


@routine
def channel_gram(e: Emit, X: Mat, Y: Mat, W: Mat, early: Value, m: Value, K: Value, out: Mat, near: Mat, far: Mat,
                 farT: Mat, ones: Rows) -> None:  # fmt: skip
    """The gram of a vector decay: blocks on the diagonal pair by pair, those before them as products."""
    with e.each(m, step=BLOCK) as b:
        rows = e.least(m - b, BLOCK)
        with e.each(b + rows, start=b) as j:
            _gram_column(e, X, Y, W, early, j, b + rows, K, out, near)
        with e.when(b > 0):
            heads(e, W, early, b, rows, K, near)
            reaches(e, W, b, K, far)
            times(e, Mat(e.address(X, b), X.row, 1), near, rows, K, near)
            times(e, Y, far, b, K, far)
            transpose(e, far, b, K, farT)
            product(e, FULL, near, farT, rows, b, K, ones, Mat(0, 0, 0), ones, Mat(e.address(out, b), out.row, 1), 0)


@routine
def _gram_column(e: Emit, X: Mat, Y: Mat, W: Mat, early: Value, j: Value, end: Value, K: Value, out: Mat,
                 near: Mat) -> None:  # fmt: skip
    """Column j of a diagonal block: y_j fades on its way down, one token at a time."""
    e.put(dot(e, e.address(X, j), e.address(Y, j), K), e.address(out, j, j))
    with e.lanes(K) as d:
        e.store(e.load(e.address(Y, j, d)), near.at + d * e.size)
    with e.each(end, start=j + 1) as i:
        fade, total = i - early, e.variable(e.zero())
        with e.lanes(K) as d:
            at, mask = near.at + d * e.size, e.below(K - d)
            p = e.load(at)
            p = e.select(fade > j, p * e.load(e.address(W, fade, d)), p)
            e.store(p, at)
            total.set(e.fma(e.select(mask, p, 0.0), e.load(e.address(X, i, d), mask), total.get()))
        e.put(e.sum(total.get()), e.address(out, i, j))


@routine
def heads(e: Emit, W: Mat, early: Value, b: Value, rows: Value, K: Value, out: Mat) -> None:
    """out_i = W_b ... W_{b + i}, to the token before if early."""
    with e.lanes(K) as d:
        p = e.variable(e.spread(e.number(1)))
        with e.each(rows) as i:
            fade = i - early
            w = e.load(e.address(W, b + e.select(fade < 0, 0, fade), d))
            p.set(e.select(fade < 0, p.get(), _faded(e, p.get(), w)))
            e.store(p.get(), e.address(out, i, d))


@routine
def reaches(e: Emit, W: Mat, b: Value, K: Value, out: Mat) -> None:
    """out_j = W_{j + 1} ... W_{b - 1} for j < b."""
    with e.lanes(K) as d:
        p = e.variable(e.spread(e.number(1)))
        with e.each(b, down=True) as j:
            e.store(p.get(), e.address(out, j, d))
            p.set(_faded(e, p.get(), e.load(e.address(W, j, d))))


@routine
def weigh(e: Emit, P: Mat, E: Mat, m: Value, whole: Value, strict: Value, factors: Rows) -> None:
    """P_ij <- factors_i P_ij E_ij for j <= i (j < i if strict), 0 beyond, also in the rows from m to `whole`."""
    with e.each(m) as i:
        f, stop = e.spread(e.get(factors.at + i * factors.step * e.size)), i + 1 - strict
        with e.lanes(whole) as j:
            at = e.address(P, i, j)
            y = e.load(at) * e.load(e.address(E, i, j)) * f
            e.store(e.select(e.below(stop - j), y, 0.0), at)
    with e.each(whole, start=m) as i, e.lanes(whole) as j:
        e.store(e.zero(), e.address(P, i, j))


@routine
def rest(e: Emit, X: Mat, Y: Mat, P: Mat, m: Value, K: Value, out: Mat, beta: Rows) -> None:
    """out_ij = x_i . y_j - P_ij for j < i: what the rounded product P leaves out, from float64 sums; 0 if beta_i <= 1.

    A row decides for itself: a choice for all rows would let the beta of a later token change an earlier output.
    """
    half = e.W // 2
    lanes = [ir.Constant(ir.VectorType(ir.IntType(32), half), [w + h * half for w in range(half)]) for h in range(2)]
    kind = ir.VectorType(DOUBLE, half)

    def halves(x: Value) -> list[ir.Value]:
        return [e.b.fpext(e.b.shuffle_vector(x.v, x.v, part), kind) for part in lanes]

    fma = e.function(f"llvm.fma.v{half}f64", kind, [kind] * 3)
    add = e.function(f"llvm.vector.reduce.fadd.v{half}f64", DOUBLE, [DOUBLE, kind])
    zero = Value(e, ir.Constant(kind, [0.0] * half))
    clear(e, out, 0, m, m)
    with e.each(m) as i, e.when(e.get(beta.at + i * beta.step * e.size) > 1.0), e.each(i) as j:
        total = [e.variable(zero), e.variable(zero)]
        with e.lanes(K) as d:
            mask = e.below(K - d)
            x, y = (halves(e.load(at, mask)) for at in (e.address(X, i, d), e.address(Y, j, d)))
            for h in range(2):
                total[h].set(Value(e, e.b.call(fma, [x[h], y[h], total[h].get().v])))
        whole = e.b.call(add, [ir.Constant(DOUBLE, 0.0), (total[0].get() + total[1].get()).v], fastmath=("reassoc",))
        P_ij = Value(e, e.b.fpext(e.get(e.address(P, i, j)).v, DOUBLE))
        e.put(Value(e, e.b.fptrunc((Value(e, whole) - P_ij).v, e.F)), e.address(out, i, j))


@routine
def any_above_one(e: Emit, x: Rows, m: Value, found: Value) -> None:
    """1 to the address `found` if one of m numbers is > 1, else 0."""
    count = e.variable(e.whole(0))
    with e.each(m) as i:
        count.set(e.select(e.get(x.at + i * x.step * e.size) > 1.0, 1, count.get()))
    e.put(count.get(), found)
