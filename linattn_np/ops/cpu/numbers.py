"""e^x, e^x - 1, log x, log(1 + x), tanh x, sin x, cos x of float32 and float64, vectorised in loops."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numba import types
from numba.extending import overload

from ...runtime.pieces.vectors import (
    F64,
    Array,
    Builder,
    Value,
    constant,
    converted,
    emitted,
    fma,
    in_every_lane,
    whole_type,
)

# ln 2 and pi / 2 in parts that add up to them, all but the last so short that whole multiples are exact
LN2_32, LN2_64 = ("0x1.628p-1", "0x1.90bfbep-11"), ("0x1.62e42feep-1", "0x1.a39ef35793c76p-33")
HALF_PI_32 = "0x1.921p+0", "0x1.f6ap-13", "0x1.110b46p-26"
HALF_PI_64 = "0x1.921fb544p+0", "0x1.0b4611a4p-34", "0x1.13198a2e03707p-65"
OPTIONS: dict[str, Any] = {"error_model": "numpy", "fastmath": {"contract", "nsz"}, "no_cpython_wrapper": True}


@emitted(lambda A, x: A.dtype.type(x), lambda A, x: A.dtype)
def number(b: Builder, A: Array, x: Value) -> Any:
    """x in the dtype of an array."""
    return converted(b, x, A.number)


def both_widths(python: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates formula(F), which makes the compiled form of a Python function for F = float32 and F = float64."""

    def decorated(formula: Callable[[Any], Any]) -> Any:
        own = {types.float32: formula(np.float32), types.float64: formula(np.float64)}
        overload(python, strict=False)(lambda x, *more: own[x])
        return formula

    return decorated


def horner(b: Builder, x: Value, coefficients: Sequence[float]) -> Value:
    """c_0 + x (c_1 + x (c_2 + ...))"""
    *others, y = [in_every_lane(x.type, c) for c in coefficients]
    for c in reversed(others):
        y = b.fadd(c, b.fmul(x, y))
    return y


def series(*coefficients: float, single: Sequence[float] = ()) -> Any:
    """c_0 + x (c_1 + x (c_2 + ...)) as a function of x, in its dtype.   single: those of float32, if not the same"""
    of = (single or coefficients, coefficients)

    @emitted(lambda x: np.polyval(of[x.dtype == np.float64][::-1], x), lambda x: x)
    def evaluated(b: Builder, x: Value) -> Any:
        return horner(b, x, of[is_double(x)])

    return evaluated


def _exp(x: Any) -> Any:
    with np.errstate(all="ignore"):
        y = np.exp(x)
    return np.where(y < np.finfo(x.dtype).tiny, x.dtype.type(0), y)[()]


class _Exp(NamedTuple):
    """Constants of e^x = 2^n p(r), n = x / ln 2 rounded, r = x - n ln 2; p: for |r| <= ln(2) / 2."""

    ln2: tuple[str, str]
    mantissa: int  # bits
    bias: int
    least: float  # e^x is 0 below
    most: float  # and inf from there on
    p: tuple[float, ...]


EXP = (  # of float32, float64
    _Exp(
        LN2_32, 23, 127, math.log(2.0**-126), 89.0,
        (1.0, 1.000000036756019, 0.49999991984602515, 0.16666418208278816, 0.041668238049080826, 0.00837498098223617,
         0.0013836638099687017),
    ),
    _Exp(
        LN2_64, 52, 1023, math.log(2.0**-1022), 710.0,
        (1.0, 1.0, 0.5000000000000018, 0.16666666666666158, 0.041666666666489986, 0.008333333333562887,
         0.0013888888951971673, 0.00019841269427795853, 2.4801485716417402e-05, 2.755762492941239e-06,
         2.7632592414207524e-07, 2.4994083750108236e-08),
    ),
)  # fmt: skip
ARTANH = (  # 2 artanh(s) / s in powers of s^2 <= 1 / 9, least relative error
    (2.0000000079209324, 0.6666631468539213, 0.4002491011450549, 0.27960605242052766, 0.2817832376269544),
    (2.0, 0.6666666666666613, 0.4000000000019034, 0.2857142854492413, 0.22222224111818956, 0.18181739786499237,
     0.1538663547459545, 0.13300102297452726, 0.12112250368475938, 0.08315679191216221, 0.17060070631404683),
)  # fmt: skip


def is_double(x: Value) -> bool:
    return getattr(x.type, "element", x.type) == F64


def write_exp(b: Builder, x: Value, is_summand: bool = False) -> Value:
    """n is rounded by adding a number so large that its last bit is 1: the sum's last bits are n + bias.

    is_summand: of a sum with 1, in which numbers below the smallest normal one need not become 0.
    """
    own, c = EXP[is_double(x)], lambda y: in_every_lane(x.type, y)
    low = b.select(b.fcmp_ordered("<", x, c(own.least)), c(own.least), x)
    inside = b.select(b.fcmp_ordered(">", low, c(own.most)), c(own.most), low)
    magic, (high, rest) = c(1.5 * 2.0**own.mantissa + own.bias), (c(-float.fromhex(y)) for y in own.ln2)
    shifted = b.fadd(b.fmul(inside, c(1 / math.log(2))), magic)
    n = b.fsub(shifted, magic)
    r = b.fadd(b.fmul(n, rest), b.fadd(b.fmul(n, high), inside))
    bits = whole_type(x.type)
    power = b.shl(b.bitcast(shifted, bits), in_every_lane(bits, own.mantissa))
    y = b.fmul(horner(b, r, own.p), b.bitcast(power, x.type))
    return y if is_summand else b.select(b.fcmp_ordered("<", x, c(own.least)), c(0.0), y)


def write_size(b: Builder, x: Value) -> Value:
    """|x|"""
    bits = whole_type(x.type)
    mask = in_every_lane(bits, (1 << (63 if is_double(x) else 31)) - 1)
    return b.bitcast(b.and_(b.bitcast(x, bits), mask), x.type)


@emitted(_exp, lambda x: x)
def exp(b: Builder, x: Value) -> Any:
    """e^x of a number, or of a vector's; at most 2 ulp off; 0 below the smallest normal number.

    -inf gives 0, NaN gives NaN, and overflow inf.
    """
    return write_exp(b, x)


def write_one_plus_exp(b: Builder, x: Value) -> Value:
    """1 + e^x"""
    return b.fadd(in_every_lane(x.type, 1.0), write_exp(b, x, True))


@emitted(lambda x: 1 + _exp(x), lambda x: x)
def one_plus_exp(b: Builder, x: Value) -> Any:
    """1 + e^x of a number, or of a vector's; as `exp`."""
    return write_one_plus_exp(b, x)


@emitted(lambda x: np.abs(x), lambda x: x)
def size_of(b: Builder, x: Value) -> Any:
    """|x| of a number, or of a vector's."""
    return write_size(b, x)


@emitted(lambda x: np.maximum(x, x.dtype.type(0)) + np.log1p(_exp(-np.abs(x))), lambda x: x)
def softplus(b: Builder, x: Value) -> Any:
    """log(1 + e^x) = max(x, 0) + log(1 + y), y = e^{-|x|};  log(1 + y) = 2 artanh(s), s = y / (2 + y) <= 1 / 3.

    The sum is rounded once in every loop: the compiler's choice may differ between numbers side by side and the rest.
    """
    two, zero = in_every_lane(x.type, 2.0), in_every_lane(x.type, 0.0)
    y = write_exp(b, b.fneg(write_size(b, x)))
    s = b.fdiv(y, b.fadd(two, y))
    series = horner(b, b.fmul(s, s), ARTANH[is_double(x)])
    return fma(b, s, series, b.select(b.fcmp_ordered("<", x, zero), zero, x))


def expm1(x: Any) -> Any:
    """e^x - 1 = 2^n (e^r - 1) + (2^n - 1), n and r as of `exp`; a few ulp off, of small x too."""
    return np.expm1(x)


@both_widths(expm1)
def _expm1(F: Any) -> Any:
    own, whole, parts, terms, ceiling = (np.finfo(F), np.int32, LN2_32, 8, F(88.0)) if F is np.float32 else (
        np.finfo(F), np.int64, LN2_64, 14, F(709.0))  # fmt: skip
    high, low = (F(float.fromhex(y)) for y in parts)
    floor, over_ln2, one, infinite = F(math.log(own.eps) - 3), F(1 / math.log(2)), F(1), F(np.inf)
    bias, mantissa = whole(own.maxexp - 1), whole(own.nmant)
    power_series = series(*(1 / math.factorial(n + 1) for n in range(terms)))

    def of(x: Any) -> Any:
        inside = x if x > floor else floor
        inside = ceiling if x > ceiling else inside
        n = np.rint(inside * over_ln2)
        r = (x - n * high) - n * low
        power = whole((whole(n) + bias) << mantissa).view(F)
        y = infinite if x > ceiling else power * (r * power_series(r)) + (power - one)
        return -one if x < floor else y

    return of


def log1p(x: Any) -> Any:
    """log(1 + x) = e ln 2 + 2 artanh((f - 1) / (f + 1)), 1 + x = 2^e f, and what its rounding leaves; x = -1: -inf."""
    with np.errstate(all="ignore"):
        return np.log1p(x)


def log(x: Any) -> Any:
    """log x; of 0, and of numbers below the smallest normal one, -inf."""
    with np.errstate(all="ignore"):
        return np.log(np.where((x >= 0) & (x < np.finfo(x.dtype).tiny), 0, x))


def _logarithm(F: Any, adds_one: bool) -> Any:
    own, whole, parts, terms = (np.finfo(F), np.int32, LN2_32, 6) if F is np.float32 else (
        np.finfo(F), np.int64, LN2_64, 12)  # fmt: skip
    high, low = (F(float.fromhex(y)) for y in parts)
    none, infinite, nan, mantissa, tiny = F(0), F(np.inf), F(np.nan), whole(own.nmant), F(own.tiny)
    one, added, root = F(1), F(adds_one), whole(F(0.5**0.5).view(whole))
    artanh = series(*(2 / (2 * n + 1) for n in range(terms)))

    def of(x: Any) -> Any:
        u = F(added + x)
        bits = F(added + x).view(whole)
        e = whole((bits - root) >> mantissa)
        f = whole(bits - whole(e << mantissa)).view(F)
        z = (f - one) / (f + one)
        rest = F(e) * low + (x - (u - added)) / u
        y = F(e) * high + (z * artanh(z * z) + rest)
        y = x if u == infinite else y
        y = -infinite if u < tiny else y
        return nan if u < none or u != u else y

    return of


both_widths(log1p)(lambda F: _logarithm(F, True))
both_widths(log)(lambda F: _logarithm(F, False))


def tanh(x: Any) -> Any:
    """(1 - y) / (1 + y) for x > 0, y = e^{-2x}, by e^{-2x} - 1."""
    return np.tanh(x)


@both_widths(tanh)
def _tanh(F: Any) -> Any:
    none, two = F(0), F(2)

    def of(x: Any) -> Any:
        less = expm1(-two * abs(x))
        y = -less / (two + less)
        return -y if x < none else y

    return of


def sigmoid(x: Any) -> Any:
    """1 / (1 + e^{-x})."""
    with np.errstate(all="ignore"):
        return x.dtype.type(1) / (x.dtype.type(1) + np.exp(-x))


@both_widths(sigmoid)
def _sigmoid(F: Any) -> Any:
    one = F(1)
    return lambda x: one / one_plus_exp(-x)


def _faded(x: Any, w: Any) -> Any:
    y = x * w
    return y * 0 if y < np.finfo(y.dtype).tiny else y


@emitted(_faded, lambda x, w: x)
def faded(b: Builder, x: Value, w: Value) -> Any:
    """x w, both >= 0; 0 where it would be subnormal, which processors multiply slowly; NaN stays."""
    y, tiny = b.fmul(x, w), 2.0**-1022 if x.type == F64 else 2.0**-126
    return b.select(b.fcmp_ordered("<", y, constant(y.type, tiny)), constant(y.type, 0.0), y)


def sine_cosine(x: Any) -> Any:
    """(sin x, cos x): x = n pi/2 + r with |r| <= pi/4, by their series; n pi/2 comes off in three parts.

    As exact as a number of x's size can be: the error grows with |x| eps. What is not finite gives NaN.
    """
    return np.sin(x), np.cos(x)


@both_widths(sine_cosine)
def _sine_cosine(F: Any) -> Any:
    parts, terms = (HALF_PI_32, 6) if F is np.float32 else (HALF_PI_64, 10)
    P1, P2, P3 = (F(float.fromhex(y)) for y in parts)
    over, one, two, four, middle, fourth = (F(y) for y in (2 / math.pi, 1, 2, 4, 1.5, 0.25))
    in_sine, in_cosine = (series(*((-1) ** n / math.factorial(2 * n + first) for n in range(terms)))
                          for first in (1, 0))  # fmt: skip

    def of(x: Any) -> Any:
        n = np.rint(x * over)
        r = ((x - n * P1) - n * P2) - n * P3
        z = r * r
        s, c = in_sine(z) * r, in_cosine(z)
        quarter = n - np.floor(n * fourth) * four
        sine, cosine = (c, s) if abs(quarter - two) == one else (s, c)
        return -sine if quarter > middle else sine, -cosine if abs(quarter - middle) < one else cosine

    return of
