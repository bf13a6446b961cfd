"""e^x, log(1 + e^x), sin x, cos x of float32 and float64, vectorised in loops; numbers of an array's dtype."""

from __future__ import annotations

import math
from decimal import Decimal, localcontext
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import overload

from ...runtime.pieces.vectors import Array, emitted

HALF_PI = Decimal("1.5707963267948966192313216916397514420985846996875529104875")
OPTIONS: dict[str, Any] = {"error_model": "numpy", "fastmath": {"contract", "nsz"}, "no_cpython_wrapper": True}


@emitted(lambda A, x: A.dtype.type(x), lambda A, x: A.dtype)
def number(b: ir.IRBuilder, A: Array, x: ir.Value) -> Any:
    """x in the dtype of an array."""
    if isinstance(x.type, ir.IntType):
        return b.sitofp(x, A.number)
    if x.type == A.number:
        return x
    return b.fptrunc(x, A.number) if A.size == 4 else b.fpext(x, A.number)


def _split_ln2(bits: int) -> tuple[float, float]:
    """ln 2 as a number of few bits, so that n times it is exact, and the rest."""
    with localcontext() as c:
        c.prec = 50
        high = Decimal(math.floor(math.log(2) * 2**bits)) / 2**bits
        return float(high), float(Decimal(2).ln() - high)


def exp(x: Any) -> Any:
    """e^x = 2^n e^r with |r| <= ln(2) / 2, e^r by its series; at most 2 ulp off; 0 below the smallest normal number.

    -inf gives 0, NaN gives NaN, and what overflows inf.
    """
    with np.errstate(all="ignore"):
        y = np.exp(x)
    return x.dtype.type(0) if y < np.finfo(x.dtype).tiny else y


@overload(exp)
def _exp(x: Any) -> Any:
    return _exp32 if x == types.float32 else _exp64


F, I = np.float32, np.int32
H32, L32 = (F(y) for y in _split_ln2(10))
FLOOR32, CEILING32, OVER_LN2_32 = F(math.log(2.0**-126)), F(88.7), F(1 / math.log(2))
E2, E3, E4, E5, E6, E7 = (F(1 / math.factorial(n)) for n in range(2, 8))


def _exp32(x: Any) -> Any:
    inside = x if x > FLOOR32 else FLOOR32
    inside = CEILING32 if x > CEILING32 else inside
    n = np.rint(inside * OVER_LN2_32)
    r = (x - n * H32) - n * L32
    y = E6 + r * E7
    y = E5 + r * y
    y = E4 + r * y
    y = E3 + r * y
    y = E2 + r * y
    y = F(1) + r * y
    y = F(1) + r * y
    power = I((I(n) + I(127)) << I(23)).view(np.float32)
    y = F(np.inf) if x > CEILING32 else y * power
    return F(0) if x < FLOOR32 else y


H64, L64 = _split_ln2(32)
FLOOR64, CEILING64, OVER_LN2 = math.log(2.0**-1022), 709.7, 1 / math.log(2)
SERIES = tuple(1 / math.factorial(n) for n in range(14))
_D2, _D3, _D4, _D5, _D6, _D7, _D8, _D9, _D10, _D11, _D12, _D13 = SERIES[2:]


def _exp64(x: Any) -> Any:
    inside = x if x > FLOOR64 else FLOOR64
    inside = CEILING64 if x > CEILING64 else inside
    n = np.rint(inside * OVER_LN2)
    r = (x - n * H64) - n * L64
    y = _D12 + r * _D13
    y = _D11 + r * y
    y = _D10 + r * y
    y = _D9 + r * y
    y = _D8 + r * y
    y = _D7 + r * y
    y = _D6 + r * y
    y = _D5 + r * y
    y = _D4 + r * y
    y = _D3 + r * y
    y = _D2 + r * y
    y = 1.0 + r * y
    y = 1.0 + r * y
    power = np.int64((np.int64(n) + np.int64(1023)) << np.int64(52)).view(np.float64)
    y = np.inf if x > CEILING64 else y * power
    return 0.0 if x < FLOOR64 else y


def log1p_exp(x: Any) -> Any:
    """log(1 + e^x) for x <= 0: with y = e^x and s = y / (2 + y) it is 2 (s + s^3 / 3 + s^5 / 5 + ...), s <= 1/3."""
    return np.log1p(exp(x))


@overload(log1p_exp)
def _log1p_exp(x: Any) -> Any:
    return _log1p_exp32 if x == types.float32 else _log1p_exp64


O3, O5, O7, O9, O11, O13 = (F(1 / n) for n in range(3, 14, 2))
ODD = tuple(1 / n for n in range(3, 34, 2))
_O3, _O5, _O7, _O9, _O11, _O13, _O15, _O17, _O19, _O21, _O23, _O25, _O27, _O29, _O31, _O33 = ODD


def _log1p_exp32(x: Any) -> Any:
    y = exp(x)
    s = y / (F(2) + y)
    z = s * s
    p = O11 + z * O13
    p = O9 + z * p
    p = O7 + z * p
    p = O5 + z * p
    p = O3 + z * p
    return F(2) * (s + s * z * p)


def _log1p_exp64(x: Any) -> Any:
    y = exp(x)
    s = y / (2.0 + y)
    z = s * s
    p = _O31 + z * _O33
    p = _O29 + z * p
    p = _O27 + z * p
    p = _O25 + z * p
    p = _O23 + z * p
    p = _O21 + z * p
    p = _O19 + z * p
    p = _O17 + z * p
    p = _O15 + z * p
    p = _O13 + z * p
    p = _O11 + z * p
    p = _O9 + z * p
    p = _O7 + z * p
    p = _O5 + z * p
    p = _O3 + z * p
    return 2.0 * (s + s * z * p)


def faded(x: Any, w: Any) -> Any:
    """x w, both >= 0; 0 where it would be subnormal, which processors multiply slowly; NaN stays."""
    y = x * w
    return y * 0 if y < np.finfo(y.dtype).tiny else y


@overload(faded)
def _faded(x: Any, w: Any) -> Any:
    return _faded32 if x == types.float32 else _faded64


TINY32, TINY64 = F(2.0**-126), 2.0**-1022


def _faded32(x: Any, w: Any) -> Any:
    y = x * w
    return F(0) if y < TINY32 else y


def _faded64(x: Any, w: Any) -> Any:
    y = x * w
    return 0.0 if y < TINY64 else y


# sin and cos


def sine_cosine(x: Any) -> Any:
    """(sin x, cos x): x = n pi/2 + r with |r| <= pi/4, by their series; n pi/2 comes off in three parts.

    As exact as a number of x's size can be: the error grows with |x| eps. What is not finite gives NaN.
    """
    return np.sin(x), np.cos(x)


@overload(sine_cosine)
def _sine_cosine(x: Any) -> Any:
    return _sine_cosine32 if x == types.float32 else _sine_cosine64


def _parts_of_half_pi(bits: int) -> tuple[float, ...]:
    """pi / 2 as two numbers of few bits, so that n times them is exact, and the rest."""
    rest, parts = HALF_PI, []
    with localcontext() as c:
        c.prec = 60
        for n in (1, 2):
            parts.append(float(Decimal(math.floor(rest * 2 ** (n * bits))) / 2 ** (n * bits)))
            rest -= Decimal(parts[-1])
        return (*parts, float(rest))


def _series(first: int, last: int) -> list[float]:
    """Coefficients of sin x / x (first = 1) or cos x (0) in x^2."""
    return [(-1) ** n / math.factorial(2 * n + first) for n in range(last + 1)]


OVER_HALF_PI, OVER_HALF_PI_32 = 2 / math.pi, F(2 / math.pi)
P1, P2, P3 = (F(y) for y in _parts_of_half_pi(12))
S1, S2, S3, S4, S5 = (F(y) for y in _series(1, 5)[1:])
C1, C2, C3, C4, C5 = (F(y) for y in _series(0, 5)[1:])
Q1, Q2, Q3 = _parts_of_half_pi(32)
T1, T2, T3, T4, T5, T6, T7, T8, T9 = _series(1, 9)[1:]
D1, D2, D3, D4, D5, D6, D7, D8, D9 = _series(0, 9)[1:]


def _sine_cosine32(x: Any) -> Any:
    n = np.rint(x * OVER_HALF_PI_32)
    r = ((x - n * P1) - n * P2) - n * P3
    z = r * r
    s = (F(1) + z * (S1 + z * (S2 + z * (S3 + z * (S4 + z * S5))))) * r
    c = F(1) + z * (C1 + z * (C2 + z * (C3 + z * (C4 + z * C5))))
    quarter = n - np.floor(n * F(0.25)) * F(4)
    odd = quarter == F(1) or quarter == F(3)
    sine, cosine = (c, s) if odd else (s, c)
    return -sine if quarter > F(1.5) else sine, -cosine if quarter == F(1) or quarter == F(2) else cosine


def _sine_cosine64(x: Any) -> Any:
    n = np.rint(x * OVER_HALF_PI)
    r = ((x - n * Q1) - n * Q2) - n * Q3
    z = r * r
    s = T5 + z * (T6 + z * (T7 + z * (T8 + z * T9)))
    s = (1.0 + z * (T1 + z * (T2 + z * (T3 + z * (T4 + z * s))))) * r
    c = D5 + z * (D6 + z * (D7 + z * (D8 + z * D9)))
    c = 1.0 + z * (D1 + z * (D2 + z * (D3 + z * (D4 + z * c))))
    quarter = n - np.floor(n * 0.25) * 4.0
    odd = quarter == 1.0 or quarter == 3.0
    sine, cosine = (c, s) if odd else (s, c)
    return -sine if quarter > 1.5 else sine, -cosine if quarter == 1.0 or quarter == 2.0 else cosine
