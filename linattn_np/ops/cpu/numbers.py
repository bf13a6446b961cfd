"""e^x, e^x - 1, log(1 + x), tanh x, sin x, cos x of float32 and float64, vectorised in loops; numbers of a dtype."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from ...runtime.pieces.vectors import F64, Array, Builder, Value, constant, converted, emitted

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


def series(*coefficients: float) -> Any:
    """c_0 + x (c_1 + x (c_2 + ...)) as a function of x, in its dtype."""

    @emitted(lambda x: x, lambda x: x)
    def evaluated(b: Builder, x: Value) -> Any:
        y, *rest = [constant(x.type, c) for c in reversed(coefficients)]
        for c in rest:
            y = b.fadd(c, b.fmul(x, y))
        return y

    return evaluated


def exp(x: Any) -> Any:
    """e^x = 2^n e^r with |r| <= ln(2) / 2, e^r by its series; at most 2 ulp off; 0 below the smallest normal number.

    -inf gives 0, NaN gives NaN, and overflow inf.
    """
    with np.errstate(all="ignore"):
        y = np.exp(x)
    return x.dtype.type(0) if y < np.finfo(x.dtype).tiny else y


@both_widths(exp)
def _exp(F: Any) -> Any:
    own, whole, parts, terms, ceiling = (np.finfo(F), np.int32, LN2_32, 8, F(88.7)) if F is np.float32 else (
        np.finfo(F), np.int64, LN2_64, 14, F(709.7))  # fmt: skip
    high, low = (F(float.fromhex(y)) for y in parts)
    floor, over_ln2, none, infinite = F(math.log(2.0**own.minexp)), F(1 / math.log(2)), F(0), F(np.inf)
    bias, mantissa = whole(own.maxexp - 1), whole(own.nmant)
    power_series = series(*(1 / math.factorial(n) for n in range(terms)))

    def of(x: Any) -> Any:
        inside = x if x > floor else floor
        inside = ceiling if x > ceiling else inside
        n = np.rint(inside * over_ln2)
        r = (x - n * high) - n * low
        power = whole((whole(n) + bias) << mantissa).view(F)
        y = infinite if x > ceiling else power_series(r) * power
        return none if x < floor else y

    return of


def softplus(x: Any) -> Any:
    """log(1 + e^x) = max(x, 0) + log(1 + y), y = e^{-|x|}: the series of log(1 + y) = 2 artanh(y / (2 + y))."""
    return np.maximum(x, 0) + np.log1p(exp(-np.abs(x)))


@both_widths(softplus)
def _softplus(F: Any) -> Any:
    terms, none, two = 8 if F is np.float32 else 17, F(0), F(2)
    artanh = series(*(2 / (2 * n + 1) for n in range(terms)))

    def of(x: Any) -> Any:
        y = exp(-abs(x))
        z = y / (two + y)
        return (x if x > none else none) + z * artanh(z * z)

    return of


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


@both_widths(log1p)
def _log1p(F: Any) -> Any:
    own, whole, parts, terms = (np.finfo(F), np.int32, LN2_32, 6) if F is np.float32 else (
        np.finfo(F), np.int64, LN2_64, 12)  # fmt: skip
    high, low = (F(float.fromhex(y)) for y in parts)
    none, one, infinite, nan, mantissa = F(0), F(1), F(np.inf), F(np.nan), whole(own.nmant)
    root = whole(F(0.5**0.5).view(whole))
    artanh = series(*(2 / (2 * n + 1) for n in range(terms)))

    def of(x: Any) -> Any:
        u = one + x
        bits = F(one + x).view(whole)
        e = whole((bits - root) >> mantissa)
        f = whole(bits - whole(e << mantissa)).view(F)
        z = (f - one) / (f + one)
        rest = F(e) * low + (x - (u - one)) / u
        y = F(e) * high + (z * artanh(z * z) + rest)
        y = x if u == infinite else y
        y = -infinite if u == none else y
        return nan if u < none else y

    return of


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
    return lambda x: one / (one + exp(-x))


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
