"""e^x, sin x and cos x in whole vectors."""

from __future__ import annotations

import math
from decimal import Decimal, localcontext

from llvmlite import ir

from .emit import Emit, Value

HALF_PI = Decimal("1.5707963267948966192313216916397514420985846996875529104875")


def _split_ln2(bits: int) -> tuple[float, float]:
    """ln 2 as a number of few bits, so that n times it is exact, and the rest."""
    with localcontext() as c:
        c.prec = 50
        high = Decimal(math.floor(math.log(2) * 2**bits)) / 2**bits
        return float(high), float(Decimal(2).ln() - high)


def smallest_normal(bits: int) -> float:
    """2^-126 of float32, 2^-1022 of float64."""
    return 2.0 ** (-126 if bits == 32 else -1022)


def exp(e: Emit, x: Value) -> Value:
    """e^x = 2^n e^r with |r| <= ln(2) / 2, e^r by its series; at most 2 ulp off; 0 below the smallest normal number.

    -inf gives 0, NaN gives NaN, and what overflows inf.
    """
    b, single = e.b, e.bits == 32
    high, low = (e.like(x, y) for y in _split_ln2(10 if single else 32))
    floor, ceiling = (e.like(x, y) for y in (math.log(smallest_normal(e.bits)), 88.7 if single else 709.7))
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


def sine_cosine(e: Emit, x: Value) -> tuple[Value, Value]:
    """(sin x, cos x): x = n pi/2 + r with |r| <= pi/4, by their series; n pi/2 comes off in three parts.

    As exact as a number of x's size can be: the error grows with |x| eps. What is not finite gives NaN.
    """
    b, single = e.b, e.bits == 32
    nearest, floor = (e.function(f"llvm.{name}.v{e.W}f{e.bits}", e.V, [e.V]) for name in ("rint", "floor"))
    n = Value(e, b.call(nearest, [(x * (2 / math.pi)).v]))
    r = x
    for part in _parts_of_half_pi(12 if single else 32):
        r = e.fma(-n, e.like(x, part), r)
    square = r * r
    sine, cosine = (_series(e, square, first, 5 if single else 9) for first in (1, 0))
    sine = sine * r
    quarter = n - Value(e, b.call(floor, [(n * 0.25).v])) * 4.0  # n mod 4
    odd = quarter.equals(1.0) | quarter.equals(3.0)
    s, c = e.select(odd, cosine, sine), e.select(odd, sine, cosine)
    return e.select(quarter > 1.5, -s, s), e.select(quarter.equals(1.0) | quarter.equals(2.0), -c, c)


def _series(e: Emit, square: Value, first: int, last: int) -> Value:
    """sum_n (-1)^n x^{2 n} / (2 n + first)!, n = 0 .. last, from x^2."""
    terms = [(-1) ** n / math.factorial(2 * n + first) for n in range(last + 1)]
    y = e.like(square, terms[-1])
    for term in reversed(terms[:-1]):
        y = e.fma(y, square, e.like(square, term))
    return y


def _parts_of_half_pi(bits: int) -> list[float]:
    """pi / 2 as two numbers of few bits, so that n times them is exact, and the rest."""
    rest, parts = HALF_PI, []
    with localcontext() as c:
        c.prec = 60
        for n in (1, 2):
            parts.append(float(Decimal(math.floor(rest * 2 ** (n * bits))) / 2 ** (n * bits)))
            rest -= Decimal(parts[-1])
        return [*parts, float(rest)]
