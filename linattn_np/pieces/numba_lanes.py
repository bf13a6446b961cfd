"""e^x in whole vectors."""

from __future__ import annotations

import math
from decimal import Decimal, localcontext

from llvmlite import ir

from .numba_emit import Emit, Value


def _split_ln2(bits: int) -> tuple[float, float]:
    """ln 2 as a number of few bits, so that n times it is exact, and the rest."""
    with localcontext() as c:
        c.prec = 50
        high = Decimal(math.floor(math.log(2) * 2**bits)) / 2**bits
        return float(high), float(Decimal(2).ln() - high)


def exp(e: Emit, x: Value) -> Value:
    """e^x = 2^n e^r with |r| <= ln(2) / 2, e^r by its series; at most 2 ulp off; 0 below e^-87 (float64: e^-708).

    -inf gives 0, NaN gives NaN, and what overflows inf.
    """
    b, single = e.b, e.bits == 32
    high, low = (e.like(x, y) for y in _split_ln2(10 if single else 32))
    floor, ceiling = (e.like(x, y) for y in ((-87.0, 88.7) if single else (-708.0, 709.7)))
    below, above = x < floor, x > ceiling
    inside = e.select(x > floor, x, floor)  # NaN, too, is kept from becoming a whole number
    inside = e.select(above, ceiling, inside)
    nearest = e.function(f"llvm.rint.v{e.W}f{e.bits}", e.V, [e.V])
    n = Value(e, b.call(nearest, [(inside * (1 / math.log(2))).v]))
    r = e.fma(-n, low, e.fma(-n, high, x))
    terms = 8 if single else 14
    y = e.like(x, 1 / math.factorial(terms - 1))
    for i in reversed(range(terms - 1)):
        y = e.fma(y, r, e.like(x, 1 / math.factorial(i)))
    whole = ir.VectorType(ir.IntType(e.bits), e.W)
    count = lambda i: ir.Constant(whole, [i] * e.W)  # noqa: E731
    bias, shift = (127, 23) if single else (1023, 52)
    power = b.bitcast(b.shl(b.add(b.fptosi(n.v, whole), count(bias)), count(shift)), e.V)
    y = e.select(above, math.inf, y * Value(e, power))
    return e.select(below, 0.0, y)
