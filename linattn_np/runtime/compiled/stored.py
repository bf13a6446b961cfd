"""Numbers stored in 16 bits: widened to float32 exactly, rounded from it to nearest even, one by one and in vectors."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from llvmlite import ir

from ..arrays import dtype_name
from ..memory import address
from .code import entry
from .emit import I16, I32, SINGLE, Emit, Value

INFINITE = 0x7F800000  # bits of float32
HALF_ROUND, HALF_NORMAL = 0x47800000, 0x38800000  # of 2^16, from which all is infinite, and of 2^-14, the least normal
MAGIC = 0x3F000000  # of 0.5, whose last bit weighs as much as that of a subnormal half


def _like(x: ir.Value, n: int) -> ir.Constant:
    """A whole number of 32 bits, in every lane if x has lanes."""
    return ir.Constant(x.type, [n] * x.type.count if isinstance(x.type, ir.VectorType) else n)


def _float(b: ir.IRBuilder, bits: ir.Value) -> ir.Value:
    lanes = isinstance(bits.type, ir.VectorType)
    return b.bitcast(bits, ir.VectorType(SINGLE, bits.type.count) if lanes else SINGLE)


def widened(b: ir.IRBuilder, kind: str, bits: ir.Value) -> ir.Value:
    """The numbers of 16 bits, in whole numbers of 32; subnormals and NaN too."""
    k = lambda n: _like(bits, n)  # noqa: E731
    if kind == "bfloat16":
        return _float(b, b.shl(bits, k(16)))
    magnitude = b.shl(b.and_(bits, k(0x7FFF)), k(13))
    finite = b.bitcast(b.fmul(_float(b, magnitude), _float(b, k((127 + 112) << 23))), bits.type)  # times 2^112
    special = b.icmp_unsigned("==", b.and_(bits, k(0x7C00)), k(0x7C00))
    y = b.select(special, b.or_(magnitude, k(0x70000000)), finite)
    return _float(b, b.or_(y, b.shl(b.and_(bits, k(0x8000)), k(16))))


def _bfloat16(b: ir.IRBuilder, bits: ir.Value) -> ir.Value:
    """Half of the last place is added, less one bit where what stays is even."""
    k = lambda n: _like(bits, n)  # noqa: E731
    high = b.lshr(bits, k(16))
    even = b.add(b.and_(high, k(1)), k(0x7FFF))
    nan = b.icmp_unsigned(">", b.and_(bits, k(0x7FFFFFFF)), k(INFINITE))
    quiet = b.or_(b.and_(high, k(0x8000)), k(0x7FC0))
    return b.select(nan, quiet, b.lshr(b.add(bits, even), k(16)))


def _float16(b: ir.IRBuilder, bits: ir.Value) -> ir.Value:
    """The same with the exponent moved; a subnormal is what 0.5 keeps of it when it is added."""
    k = lambda n: _like(bits, n)  # noqa: E731
    magnitude = b.and_(bits, k(0x7FFFFFFF))
    odd = b.and_(b.lshr(magnitude, k(13)), k(1))
    moved = b.add(magnitude, k((15 - 127) * 2**23 + 0xFFF & 0xFFFFFFFF))
    normal = b.lshr(b.add(moved, odd), k(13))
    added = b.fadd(_float(b, magnitude), _float(b, k(MAGIC)))
    subnormal = b.sub(b.bitcast(added, bits.type), k(MAGIC))
    kept = b.add(b.lshr(b.and_(bits, k(0x7FFFFF)), k(13)), k(0x7C00))  # of a NaN, which must not become infinite
    kept = b.select(b.icmp_unsigned("==", kept, k(0x7C00)), k(0x7C01), kept)
    special = b.select(b.icmp_unsigned(">", magnitude, k(INFINITE)), kept, k(0x7C00))
    finite = b.select(b.icmp_unsigned("<", magnitude, k(HALF_NORMAL)), subnormal, normal)
    rounded = b.select(b.icmp_unsigned(">=", magnitude, k(HALF_ROUND)), special, finite)
    return b.or_(rounded, b.and_(b.lshr(bits, k(16)), k(0x8000)))


def _each(e: Emit, x: Value, to: Value, n: Value, narrow: Callable[[ir.IRBuilder, ir.Value], ir.Value]) -> None:
    """Vectors as long as there are whole ones, then number by number."""
    whole, shorts = n // e.W * e.W, ir.VectorType(I16, e.W)
    with e.each(whole, step=e.W) as i:
        bits = narrow(e.b, e.b.bitcast(e.load(x + i * 4).v, ir.VectorType(I32, e.W)))
        e.b.store(e.b.trunc(bits, shorts), e.pointer(to + i * 2, shorts)).align = 2
    with e.each(n, start=whole) as i:
        bits = narrow(e.b, e.get(x + i * 4, I32).v)
        e.put(Value(e, e.b.trunc(bits, I16)), to + i * 2)


@entry(numbers=0, wholes=3)
def to_bfloat16(e: Emit, x: Value, to: Value, n: Value) -> None:
    """n numbers from x on."""
    _each(e, x, to, n, _bfloat16)


@entry(numbers=0, wholes=3)
def to_float16(e: Emit, x: Value, to: Value, n: Value) -> None:
    """n numbers from x on."""
    _each(e, x, to, n, _float16)


ROUNDED = {"bfloat16": to_bfloat16, "float16": to_float16}


def put(to: np.ndarray, x: np.ndarray) -> None:
    """to[...] = x, of one shape."""
    kind = ROUNDED.get(dtype_name(to))
    if kind is not None and x.dtype == np.float32 and to.flags.c_contiguous and x.flags.c_contiguous and (
        to.shape == x.shape and not address(to) % 2):  # fmt: skip
        kind(np.float32)(address(x), address(to), x.size)
    else:
        to[...] = x


def cast(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """x in a dtype, in the order of its axes."""
    to = np.empty(x.shape, dtype)
    put(to, x)
    return to
