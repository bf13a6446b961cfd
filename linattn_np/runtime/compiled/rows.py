"""Rows of numbers: loading any storage dtype at any stride, sums and products of rows."""

from __future__ import annotations

from llvmlite import ir

from .emit import DOUBLE, I16, I32, I64, SINGLE, Emit, Mat, Rows, Value, routine
from .stored import widened

STORAGE = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 3}
NAMES = list(STORAGE)
LINE = 64  # bytes that memory moves at once


def _stored(e: Emit, storage: int, at: Value, many: bool = False) -> Value:
    """The number of a storage dtype at an address, exactly, subnormals too; with `many` a vector of 16-bit ones."""
    b, kinds = e.b, (SINGLE, DOUBLE)
    if storage < 2:
        x = e.get(at, kinds[storage]).v
    elif many:
        shorts = b.load(e.pointer(at, ir.VectorType(I16, e.W)))
        shorts.align = 2
        x = widened(b, NAMES[storage], b.zext(shorts, ir.VectorType(I32, e.W)))
    else:
        x = widened(b, NAMES[storage], b.zext(e.get(at, I16).v, I32))
    single = x.type.element if many else x.type
    if single == SINGLE and e.F == DOUBLE:
        x = b.fpext(x, e.V if many else DOUBLE)
    elif single == DOUBLE and e.F == SINGLE:
        x = b.fptrunc(x, SINGLE)
    return Value(e, x)


@routine
def load(e: Emit, out: Mat, m: Value, n: Value, storage: Value, at: Value, row_step: Value, step: Value) -> None:
    """out (m, n) from memory, rows `row_step` bytes apart, numbers `step` bytes."""
    own = 0 if e.bits == 32 else 1

    def copied() -> None:
        with e.each(m) as i:
            e.across(n, lambda j, mask: e.store(e.load(at + i * row_step + j * e.size, mask), e.address(out, i, j)))

    def converted(kind: int) -> None:
        with e.each(m) as i, e.each(n) as j:
            e.put(_stored(e, kind, at + i * row_step + j * step), e.address(out, i, j))

    def widened_rows(kind: int) -> None:
        whole = n // e.W * e.W
        with e.each(m) as i:
            with e.each(whole, step=e.W) as j:
                e.store(_stored(e, kind, at + i * row_step + j * 2, many=True), e.address(out, i, j))
            with e.each(n, start=whole) as j:
                e.put(_stored(e, kind, at + i * row_step + j * 2), e.address(out, i, j))

    e.choose(
        (storage.equals(own) & step.equals(e.size), copied),
        *[(storage.equals(kind) & step.equals(2), lambda kind=kind: widened_rows(kind)) for kind in (2, 3)],
        *[(storage.equals(kind), lambda kind=kind: converted(kind)) for kind in STORAGE.values()],
    )


@routine
def expect(e: Emit, end: Value, m: Value, count: Value, at: Value, row_step: Value) -> None:
    """Addresses of the lines of m rows of `count` bytes, `row_step` bytes apart, from where `end` points to on."""
    to = e.variable(e.get(end, I64))
    with e.each(m) as i, e.each(count, step=LINE) as j:
        e.put(at + i * row_step + j, to.get())
        to.set(to.get() + 8)
    e.put(to.get(), end)


def ask(e: Emit, expected: Value) -> None:
    """Ask memory for the next lines that are expected: `expected` has their address, the end of them, how many."""
    byte = ir.IntType(8).as_pointer()
    prefetch = e.function("llvm.prefetch.p0", ir.VoidType(), [byte, I32, I32, I32])
    first, end, count = (e.get(expected + 8 * n, I64) for n in range(3))
    with e.when(first < end):
        stop = e.least(first + count * 8, end)
        with e.each(stop, start=first, step=8) as at:
            e.b.call(prefetch, [e.pointer(e.get(at, I64), ir.IntType(8)), *(ir.Constant(I32, n) for n in (0, 2, 1))])
        e.put(stop, expected)


@routine
def put(e: Emit, X: Mat, factors: Rows, m: Value, n: Value, at: Value, row_step: Value, more: Value) -> None:
    """Rows factors_i X_i to memory, `row_step` bytes apart; added to what is there if `more`."""
    with e.each(m) as i:
        f = e.spread(e.get(factors.at + i * factors.step * e.size))

        def row(j: Value, mask: Value | None) -> None:
            to = at + i * row_step + j * e.size
            y = e.variable(f * e.load(e.address(X, i, j)))
            with e.when(more.compare("!=", 0)):
                y.set(y.get() + e.load(to, mask))
            e.store(y.get(), to, mask)

        e.across(n, row)


@routine
def clear(e: Emit, out: Mat, begin: Value, end: Value, n: Value) -> None:
    """Rows begin..end of out are zero."""
    with e.each(end, start=begin) as i:
        e.across(n, lambda j, mask: e.store(e.zero(), e.address(out, i, j), mask))


@routine
def times(e: Emit, X: Mat, F: Mat, m: Value, n: Value, out: Mat) -> None:
    """out = X (.) F, all (m, n)."""
    with e.each(m) as i, e.lanes(n) as j:
        e.store(e.load(e.address(X, i, j)) * e.load(e.address(F, i, j)), e.address(out, i, j))


@routine
def add_times(e: Emit, X: Mat, F: Mat, m: Value, n: Value, out: Mat) -> None:
    """out += X (.) F, all (m, n)."""
    with e.each(m) as i, e.lanes(n) as j:
        to = e.address(out, i, j)
        e.store(e.fma(e.load(e.address(X, i, j)), e.load(e.address(F, i, j)), e.load(to)), to)


@routine
def accumulate(e: Emit, X: Mat, m: Value, n: Value, out: Mat) -> None:
    """out += X, all (m, n)."""
    with e.each(m) as i, e.lanes(n) as j:
        to = e.address(out, i, j)
        e.store(e.load(to) + e.load(e.address(X, i, j)), to)


@routine
def scaled(e: Emit, X: Mat, m: Value, n: Value, out: Mat, factors: Rows) -> None:
    """out_i = factors_i X_i"""
    with e.each(m) as i:
        f = e.spread(e.get(factors.at + i * factors.step * e.size))
        with e.lanes(n) as j:
            e.store(f * e.load(e.address(X, i, j)), e.address(out, i, j))


@routine
def reach(e: Emit, out: Rows, x: Rows, y: Rows, m: Value, sign: Value) -> None:
    """out_i = sign x_i y_i"""
    s = e.select(sign < 0, e.number(-1), e.number(1))
    with e.each(m) as i:
        x_i, y_i = (e.get(z.at + i * z.step * e.size) for z in (x, y))
        e.put(s * x_i * y_i, out.at + i * e.size)


def dot(e: Emit, x: Value, y: Value, n: Value) -> Value:
    """x . y of n numbers from two addresses on."""
    total = e.variable(e.zero())
    add = lambda j, mask: total.set(e.fma(e.load(x + j * e.size, mask), e.load(y + j * e.size, mask), total.get()))  # noqa: E731
    e.across(n, add)
    return e.sum(total.get())


@routine
def add_dots(e: Emit, out: Rows, X: Mat, Y: Mat, m: Value, n: Value, below: Value, sign: Value) -> None:
    """out_i += sign X_i . Y_i, over columns j < i only if `below`."""
    s = e.select(sign < 0, e.number(-1), e.number(1))
    with e.each(m) as i:
        k = e.select(below.equals(0), n, i)
        at = out.at + i * out.step * e.size
        e.put(e.get(at) + s * dot(e, e.address(X, i), e.address(Y, i), k), at)
