"""Whole numbers of 16, 12 or 8 bits in rows, as floating ones in registers.

12 bits are the upper eight, and a byte has the lower four of two neighbours, the even one below.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils

from .registers import Lanes
from .vectors import BYTES, F64, I32, I64, Array, Builder, Value, emitted, known, lane, lanes, vector_of


def every(x: Value, y: int) -> Value:
    """A whole number in every lane, in the type of x."""
    return ir.Constant(x.type, [y] * x.type.count)


def place(b: Builder, x: Array, i: Value, d: Value, count: int) -> Value:
    """Where so many numbers of row i lie."""
    return b.inttoptr(x.at(i, d), ir.VectorType(x.number, count).as_pointer())


def interleaved(n: int) -> Value:
    """0, n / 2, 1, n / 2 + 1, ..."""
    return lanes(x for m in range(n // 2) for x in (m, m + n // 2))


def codes_of(L: int) -> Any:
    """codes(bits, whole, upper, low, i, d, like): the codes of row i and channels d, d + 1, ... of L vectors.

    All of them exist; d is even. They are numbers in the dtype of `like`.
    """

    def python(bits, whole, upper, low, i, d, like):  # type: ignore[no-untyped-def]
        n = L * lane(like.dtype)
        x = (whole if bits == 16 else upper)[i, d : d + n].astype(like.dtype)
        if bits != 12:
            return x
        four = low[i, d // 2 : (d + n) // 2]
        return 16 * x + np.stack([four & 15, four >> 4], -1).reshape(n)

    def kind(*given: Any) -> Lanes:
        return Lanes(given[-1].dtype, L * BYTES * 8 // given[-1].dtype.bitwidth)

    @emitted(python, kind)
    def codes(b: Builder, bits: Value, whole: Array, upper: Array, low: Array, i: Value, d: Value, like: Array) -> Any:
        n = L * like.vector.count
        numbers, found = vector_of(like.dtype, n), cgutils.alloca_once(b, vector_of(like.dtype, n))

        def read(x: Array, j: Value, count: int) -> Value:
            return b.load(place(b, x, i, j, count), align=x.size)

        with b.if_else(b.icmp_signed("==", bits, I64(16))) as (sixteen, fewer):
            with sixteen:
                b.store(b.sitofp(read(whole, d, n), numbers), found)
            with fewer, b.if_else(b.icmp_signed("==", bits, I64(8))) as (eight, twelve):
                with eight:
                    b.store(b.sitofp(read(upper, d, n), numbers), found)
                with twelve:
                    high = b.sext(read(upper, d, n), ir.VectorType(I32, n))
                    pair = read(low, b.lshr(d, I64(1)), n // 2)
                    four = b.shuffle_vector(b.and_(pair, every(pair, 15)), b.lshr(pair, every(pair, 4)), interleaved(n))
                    b.store(b.sitofp(b.or_(b.shl(high, every(high, 4)), b.zext(four, high.type)), numbers), found)
        return b.load(found)

    return codes


def _round_to(v, bits, whole, upper, low, i, d):  # type: ignore[no-untyped-def]
    x, n = np.rint(v).astype(np.int16), len(v)
    if bits == 16:
        whole[i, d : d + n] = x
    else:
        upper[i, d : d + n] = x if bits == 8 else x >> 4
    if bits == 12:
        low[i, d // 2 : (d + n) // 2] = (x[::2] & 15) | (x[1::2] & 15) << 4


@emitted(_round_to)
def round_to(b: Builder, v: Value, bits: Value, whole: Array, upper: Array, low: Array, i: Value, d: Value) -> None:
    """The inverse of `codes`, of one vector: rounded to the nearest."""
    n, name = v.type.count, f"llvm.rint.v{v.type.count}f{64 if v.type.element == F64 else 32}"
    x = b.fptosi(b.call(known(b, name, v.type, [v.type]), [v]), ir.VectorType(I32, n))

    def write(y: Value, to: Array, j: Value) -> None:
        b.store(b.trunc(y, ir.VectorType(to.number, y.type.count)), place(b, to, i, j, y.type.count), align=to.size)

    with b.if_else(b.icmp_signed("==", bits, I64(16))) as (sixteen, fewer):
        with sixteen:
            write(x, whole, d)
        with fewer, b.if_else(b.icmp_signed("==", bits, I64(8))) as (eight, twelve):
            with eight:
                write(x, upper, d)
            with twelve:
                write(b.ashr(x, every(x, 4)), upper, d)
                even, odd = (b.shuffle_vector(x, x, lanes(range(first, n, 2))) for first in (0, 1))
                even = b.and_(even, every(even, 15))
                write(b.or_(even, b.shl(b.and_(odd, every(odd, 15)), every(odd, 4))), low, b.lshr(d, I64(1)))
