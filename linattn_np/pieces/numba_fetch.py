"""Rows of described arrays: fetched in any storage dtype at any strides, and combined in whole vectors.

An array is described by a row of whole numbers: address, bytes from a batch row, token, head and column to the next,
how many heads share one of its own, storage dtype. Rows of a thread's own memory have room for whole vectors.
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .numba_jit import apart, jit
from .numba_tiles import I32, I64, Emit

FIELDS = 7  # at, batch, token, head, column, shared, storage
I16 = ir.IntType(16)


def loop(b: ir.IRBuilder, begin: ir.Value, end: ir.Value, step: int, body: Callable[[ir.Value], None]) -> None:
    """body(j) for j = begin, begin + step, ... below end; as it stands, neither unrolled nor put into vectors."""
    before, inside, done = b.block, b.append_basic_block("loop"), b.append_basic_block("loop.done")
    b.cbranch(b.icmp_signed("<", begin, end), inside, done)
    b.position_at_end(inside)
    j = b.phi(I64)
    j.add_incoming(begin, before)
    body(j)
    after = b.add(j, ir.Constant(I64, step))
    j.add_incoming(after, b.block)
    again = b.cbranch(b.icmp_signed("<", after, end), inside, done)
    words = [["llvm.loop.unroll.disable"], ["llvm.loop.vectorize.width", ir.Constant(I32, 1)]]
    again.set_metadata("llvm.loop", b.module.add_metadata([b.module.add_metadata(w) for w in words]))
    b.position_at_end(done)


def _to_bits(b: ir.IRBuilder, bits: ir.Value, wide: Callable[[ir.Type], ir.Type], brain: bool) -> ir.Value:
    """16 bits a number as float32: bfloat16, or float16 with its subnormals exact."""
    I, F = wide(I32), wide(ir.FloatType())
    every = lambda kind, x: ir.Constant(kind, [x] * kind.count if isinstance(kind, ir.VectorType) else x)  # noqa: E731
    whole = b.zext(bits, I)
    if brain:
        return b.bitcast(b.shl(whole, every(I, 16)), F)
    magnitude = b.shl(b.and_(whole, every(I, 0x7FFF)), every(I, 13))
    scaled = b.fmul(b.bitcast(magnitude, F), every(F, 2.0**112))
    special = b.icmp_unsigned(">=", magnitude, every(I, 0x7C00 << 13))  # inf and NaN
    scaled = b.select(special, b.or_(magnitude, every(I, 0x70000000)), b.bitcast(scaled, I))
    return b.bitcast(b.or_(scaled, b.shl(b.and_(whole, every(I, 0x8000)), every(I, 16))), F)


def _converted(e: Emit, storage: int, at: ir.Value, lanes: int) -> ir.Value:
    """`lanes` numbers, side by side from an address on, in the type of e."""
    b = e.b
    wide = lambda kind: ir.VectorType(kind, lanes) if lanes > 1 else kind  # noqa: E731
    stored = (ir.FloatType(), ir.DoubleType(), I16, I16)[storage]
    x = b.load(b.inttoptr(at, wide(stored).as_pointer()))
    x.align = 1
    if storage > 1:
        x = _to_bits(b, x, wide, storage == 3)
    have, want = (64 if storage == 1 else 32), e.bits
    if have == want:
        return x
    return b.fpext(x, wide(e.F)) if have < want else b.fptrunc(x, wide(e.F))


@intrinsic
def _fetch(context, one, arrays, name, batch, token, head, column, m, n, out, out_row):
    """m rows `out_row` bytes apart <- n columns from `column` on of m tokens of a described array."""

    def emit(context, b, signature, given):
        _, table, name, batch, token, head, column, m, n, out, out_row = given
        e = Emit(b, signature.args[0])
        table = b.ptrtoint(context.make_array(signature.args[1])(context, b, table).data, I64)
        field = lambda i: b.load(b.inttoptr(b.add(table, b.mul(e.const(8), b.add(  # noqa: E731
            b.mul(name, e.const(FIELDS)), e.const(i)))), I64.as_pointer()))  # fmt: skip
        at, batch_step, token_step, head_step, step, shared, storage = (field(i) for i in range(FIELDS))
        for index, by in ((batch, batch_step), (token, token_step), (b.sdiv(head, shared), head_step), (column, step)):
            at = b.add(at, b.mul(index, by))
        done = b.append_basic_block("fetched")
        cases = [b.append_basic_block(f"storage.{i}") for i in range(4)]
        switch = b.switch(storage, cases[0])
        for i, block in enumerate(cases[1:], 1):
            switch.add_case(e.const(i), block)
        for i, block in enumerate(cases):
            b.position_at_end(block)
            size = (4, 8, 2, 2)[i]
            dense = b.icmp_signed("==", step, e.const(size))
            vectors = b.select(dense, b.and_(n, e.const(-e.W)), e.const(0))

            def fetch_row(r, i=i, size=size, vectors=vectors):
                row, to = b.add(at, b.mul(r, token_step)), b.add(out, b.mul(r, out_row))
                loop(b, e.const(0), vectors, e.W, lambda j: e.store(
                    _converted(e, i, b.add(row, b.mul(j, e.const(size))), e.W), e.address(to, j), None))

                def single(j):
                    x = _converted(e, i, b.add(row, b.mul(j, step)), 1)
                    b.store(x, b.inttoptr(e.address(to, j), e.F.as_pointer())).align = e.size

                loop(b, vectors, n, 1, single)

            loop(b, e.const(0), m, 1, fetch_row)
            b.branch(done)
        b.position_at_end(done)
        return context.get_dummy_value()

    return types.void(one, arrays, *[types.int64] * 9), emit


@jit
def fetch(one, arrays, name, batch, token, head, column, m, n, out, out_row):
    """m rows `out_row` bytes apart <- n columns from `column` on of m tokens of a described array."""
    apart()
    _fetch(one, arrays, name, batch, token, head, column, m, n, out, out_row)


@intrinsic
def _copy_rows(context, one, start, start_row, to, to_row, m, n):
    """m rows of n numbers <- m rows, both from an address on and a number of bytes apart."""

    def emit(context, b, signature, given):
        _, start, start_row, to, to_row, m, n = given
        e = Emit(b, signature.args[0])
        vectors = b.and_(n, e.const(-e.W))

        def copy(r):
            x, y = b.add(start, b.mul(r, start_row)), b.add(to, b.mul(r, to_row))
            loop(b, e.const(0), vectors, e.W, lambda j: e.store(e.load(e.address(x, j), None), e.address(y, j), None))
            loop(b, vectors, n, 1, lambda j: b.store(
                e.number(e.address(x, j)), b.inttoptr(e.address(y, j), e.F.as_pointer())))

        loop(b, e.const(0), m, 1, copy)
        return context.get_dummy_value()

    return types.void(one, *[types.int64] * 6), emit


@jit
def copy_rows(one, start, start_row, to, to_row, m, n):
    """m rows of n numbers <- m rows, both from an address on and a number of bytes apart."""
    apart()
    _copy_rows(one, start, start_row, to, to_row, m, n)


@intrinsic
def fill(context, one, x, out, n):
    """n numbers from an address on <- x, in whole vectors."""

    def emit(context, b, signature, given):
        e = Emit(b, signature.args[0])
        loop(b, e.const(0), given[3], e.W, lambda j: e.store(e.spread(given[1]), e.address(given[2], j), None))
        return context.get_dummy_value()

    return types.void(one, one, types.int64, types.int64), emit


@intrinsic
def times_row(context, one, x, f, step, out, n):
    """out_j = x_j f_{j step}, in whole vectors: step 1, or 0 for one factor."""

    def emit(context, b, signature, given):
        _, x, f, step, out, n = given
        e = Emit(b, signature.args[0])
        each = b.icmp_signed("!=", step, e.const(0))

        def body(j):
            factors = b.select(each, e.load(e.address(f, b.mul(j, step)), None), e.spread(e.number(f)))
            e.store(b.fmul(e.load(e.address(x, j), None), factors), e.address(out, j), None)

        loop(b, e.const(0), n, e.W, body)
        return context.get_dummy_value()

    return types.void(one, *[types.int64] * 5), emit


@intrinsic
def error_row(context, one, f, x, y, out, n):
    """out = f (x - y), in whole vectors."""

    def emit(context, b, signature, given):
        _, f, x, y, out, n = given
        e = Emit(b, signature.args[0])

        def body(j):
            d = b.fsub(e.load(e.address(x, j), None), e.load(e.address(y, j), None))
            e.store(b.fmul(e.spread(f), d), e.address(out, j), None)

        loop(b, e.const(0), n, e.W, body)
        return context.get_dummy_value()

    return types.void(one, one, *[types.int64] * 4), emit


@intrinsic
def answer_row(context, one, f, x, c, y, n):
    """x <- f (x + c y), in whole vectors."""

    def emit(context, b, signature, given):
        _, f, x, c, y, n = given
        e = Emit(b, signature.args[0])

        def body(j):
            at = e.address(x, j)
            sum_ = e.fma(e.spread(c), e.load(e.address(y, j), None), e.load(at, None))
            e.store(b.fmul(e.spread(f), sum_), at, None)

        loop(b, e.const(0), n, e.W, body)
        return context.get_dummy_value()

    return types.void(one, one, types.int64, one, types.int64, types.int64), emit
