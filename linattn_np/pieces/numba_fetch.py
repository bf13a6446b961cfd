"""Rows of a kernel written as instructions: fetched from described arrays, copied, combined.

An array is described by a row of whole numbers: address, bytes from a batch row, token, head and column to the next,
how many heads share one of its own, storage dtype. Rows of a thread's own memory have room for whole vectors; what
lies between their end and that of the vector is computed and not used.
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from .numba_lanes import emit_exp
from .numba_stage import Int, Stage
from .numba_tiles import I32

FIELDS = 7  # at, batch, token, head, column, shared, storage
I16 = ir.IntType(16)
SIZES = (4, 8, 2, 2)  # bytes of float32, float64, float16, bfloat16


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


def _converted(s: Stage, storage: int, at: Int, lanes: int) -> ir.Value:
    """`lanes` numbers, side by side from an address on, in the type of s."""
    b = s.b
    wide = lambda kind: ir.VectorType(kind, lanes) if lanes > 1 else kind  # noqa: E731
    stored = (ir.FloatType(), ir.DoubleType(), I16, I16)[storage]
    x = b.load(b.inttoptr(at.value, wide(stored).as_pointer()))
    x.align = 1
    if storage > 1:
        x = _to_bits(b, x, wide, storage == 3)
    have = 64 if storage == 1 else 32
    if have == s.bits:
        return x
    return b.fpext(x, wide(s.F)) if have < s.bits else b.fptrunc(x, wide(s.F))


def fetch(s: Stage, arrays: Int, name: int, batch, token, head, column, m, n, out, out_row) -> None:
    """m rows `out_row` bytes apart <- n columns from `column` on of m tokens of a described array."""
    s.routine("fetch", _fetch, arrays + 8 * FIELDS * name, batch, token, head, column, m, n, out, out_row)


def _fetch(s: Stage, array, batch, token, head, column, m, n, out, out_row) -> None:
    at, batch_step, token_step, head_step, step, shared, storage = (s.field(array, i) for i in range(FIELDS))
    at = at + batch * batch_step + token * token_step + head // shared * head_step + column * step
    for kind, size in enumerate(SIZES):
        with s.when(storage == kind):
            vectors = s.choose(step == size, n & -s.W, 0)
            with s.each(0, m) as i:
                row, to = at + i * token_step, out + i * out_row
                with s.each(0, vectors, s.W) as j:
                    s.put_vector(_converted(s, kind, row + j * size, s.W), to + j * s.size)
                with s.each(vectors, n) as j:
                    s.put(_converted(s, kind, row + j * step, 1), to + j * s.size)


def copy_rows(s: Stage, start, start_row, to, to_row, m, n) -> None:
    """m rows of n numbers <- m rows, each from an address on and a number of bytes apart."""
    s.routine("copy", _copy_rows, start, start_row, to, to_row, m, n)


def _copy_rows(s: Stage, start, start_row, to, to_row, m, n) -> None:
    vectors = n & -s.W
    with s.each(0, m) as i:
        x, y = start + i * start_row, to + i * to_row
        with s.each(0, vectors, s.W) as j:
            s.put_vector(s.vector(x + j * s.size), y + j * s.size)
        with s.each(vectors, n) as j:
            s.put(s.get(x + j * s.size), y + j * s.size)


def fill_rows(s: Stage, x: float, out, out_row, m, n) -> None:
    """m rows of n numbers <- x, in whole vectors."""
    with s.each(0, m) as i, s.each(0, n, s.W) as j:
        s.put_vector(ir.Constant(s.V, [x] * s.W), out + i * out_row + j * s.size)


def exp_row(s: Stage, x, n) -> None:
    """x <- e^x, in whole vectors."""

    def body(s, x, n):
        with s.each(0, n, s.W) as j:
            s.put_vector(emit_exp(s, s.vector(x + j * s.size)), x + j * s.size)

    s.routine("exp", body, x, n)


def times_row(s: Stage, x, f, each, n) -> None:
    """x_j <- x_j f_j, or x_j f_0 unless `each`, in whole vectors."""
    with s.each(0, n, s.W) as j:
        factors = s.b.select((s.int(each) != 0).value, s.vector(f + j * each * s.size), s.spread(s.get(f)))
        s.put_vector(s.b.fmul(s.vector(x + j * s.size), factors), x + j * s.size)


def error_row(s: Stage, f: ir.Value, x, y, out, n) -> None:
    """out = f (x - y), in whole vectors."""
    with s.each(0, n, s.W) as j:
        d = s.b.fsub(s.vector(x + j * s.size), s.vector(y + j * s.size))
        s.put_vector(s.b.fmul(s.spread(f), d), out + j * s.size)


def answer_row(s: Stage, f: ir.Value, x, c: ir.Value, y, n) -> None:
    """x <- f (x + c y), in whole vectors."""
    with s.each(0, n, s.W) as j:
        total = s.fma(s.spread(c), s.vector(y + j * s.size), s.vector(x + j * s.size))
        s.put_vector(s.b.fmul(s.spread(f), total), x + j * s.size)
