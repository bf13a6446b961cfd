"""Formulas of rows, each with its derivative below it: out = f(x, y, z, u; a), rows of one token and head."""

from __future__ import annotations

from math import factorial
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit

from ...runtime.pieces.piece import Number, Vector, Whole, piece
from ...runtime.pieces.tiles import dot, max_of, sum_of
from ...runtime.pieces.vectors import BYTES, I64, Array, Builder, Value, broadcast, constant, emitted, fma, lanes, loop
from ...runtime.pieces.views import rows
from .numbers import OPTIONS, exp, expm1, number, series, sine_cosine
from .rows import length_of


@piece(of="appended")
def appended(x: Vector, y: Vector, u: Vector, out: Vector):
    """u [x, y]; no y: u [x, 1], no u: 1"""
    n, s = len(x), u[0] if len(u) else number(out, 1)
    for j in range(n):
        out[j] = s * x[j]
    out[n] = s * y[0] if len(y) else s


# rotations of pairs: (even, odd) <- (even c - odd s, even s + odd c), s with the opposite sign if `back`


@piece(of="cos_sin")
def cos_sin(x: Vector, y: Vector, out: Vector):
    """cos(x y), then sin(x y)"""
    n, at = len(x), y[0]
    cosines, sines = rows(out, 0, n), rows(out, n, n)  # no offset in the loop: vectors
    for j in range(n):
        sines[j], cosines[j] = sine_cosine(x[j] * at)


def _rotate_vectors(x: Any, c: Any, s: Any, sign: Any, count: int, out: Any) -> None:
    even, odd, cosine, sine = x[0 : 2 * count : 2].copy(), x[1 : 2 * count : 2].copy(), c[:count], sign * s[:count]
    out[0 : 2 * count : 2], out[1 : 2 * count : 2] = even * cosine - odd * sine, even * sine + odd * cosine


@emitted(_rotate_vectors)
def rotate_vectors(b: Builder, x: Array, c: Array, s: Array, sign: Value, count: Value, out: Array) -> None:
    """`count` pairs of a row, in whole vectors: (x_0, x_1, ..) (c_0, c_0, ..) + (x_1, x_0, ..) (-s_0, s_0, ..)"""
    W = x.vector.count
    half, none = ir.VectorType(x.number, W // 2), constant(x.vector, ir.Undefined)
    signs = b.fmul(broadcast(b, sign, x.vector), constant(x.vector, [-1.0, 1.0] * (W // 2)))

    def twice(y: Array, p: Value) -> Value:
        each = b.load(b.inttoptr(y.at(p), half.as_pointer()), align=y.size)
        return b.shuffle_vector(each, constant(half, ir.Undefined), lanes(n // 2 for n in range(W)))

    with loop(b, 0, count, W // 2) as p:
        at = b.mul(p, I64(2))
        pair = x.load(x.at(at))
        other = b.shuffle_vector(pair, none, lanes(n ^ 1 for n in range(W)))
        out.store(fma(b, other, b.fmul(twice(s, p), signs), b.fmul(pair, twice(c, p))), out.at(at))


@njit(**OPTIONS)
def rotate_pairs(x: Any, c: Any, s: Any, back: Any, out: Any) -> None:
    """The pairs (2 p, 2 p + 1) of a row, rotated by their own angle; out may be x."""
    P, each, sign = len(c), BYTES // out.itemsize // 2, number(out, -1 if back else 1)
    whole = P // each * each
    rotate_vectors(x, c, s, sign, whole, out)
    for p in range(whole, P):
        even, odd, sine = x[2 * p], x[2 * p + 1], sign * s[p]
        out[2 * p] = even * c[p] - odd * sine
        out[2 * p + 1] = even * sine + odd * c[p]


def _rotate_vectors_vjp(x: Any, dx: Any, more: Any, f: Any, c: Any, s: Any, count: int, dangle: Any, out: Any) -> None:
    even, odd, cosine, sine = slice(0, 2 * count, 2), slice(1, 2 * count, 2), c[:count], s[:count]
    dangle[:count] += x[even] * dx[odd] - x[odd] * dx[even]
    y = dx[: 2 * count] + (f * more[: 2 * count] if len(more) else 0)
    out[even], out[odd] = y[even] * cosine + y[odd] * sine, y[odd] * cosine - y[even] * sine


@emitted(_rotate_vectors_vjp)
def rotate_vectors_vjp(
    b: Builder, x: Array, dx: Array, more: Array, f: Value, c: Array, s: Array, count: Value, dangle: Array, out: Array
) -> None:
    """`rotate_pairs_vjp` of `count` pairs, in whole vectors."""
    W = x.vector.count
    half, factor = ir.VectorType(x.number, W // 2), broadcast(b, f, x.vector)

    def parts(pair: Value) -> list[Value]:
        none = constant(x.vector, ir.Undefined)
        return [b.shuffle_vector(pair, none, lanes(range(first, W, 2))) for first in (0, 1)]

    def write(adds: bool) -> None:
        with loop(b, 0, count, W // 2) as p:
            at = b.mul(p, I64(2))
            c_p, s_p = (b.load(b.inttoptr(y.at(p), half.as_pointer()), align=y.size) for y in (c, s))
            (even, odd), dpair = parts(x.load(x.at(at))), dx.load(dx.at(at))
            deven, dodd = parts(dpair)
            total = b.inttoptr(dangle.at(p), half.as_pointer())
            less = b.fsub(b.load(total, align=x.size), b.fmul(odd, deven))
            b.store(fma(b, even, dodd, less), total, align=x.size)
            if adds:
                deven, dodd = parts(fma(b, factor, more.load(more.at(at)), dpair))
            first = fma(b, dodd, s_p, b.fmul(deven, c_p))
            second = fma(b, b.fneg(deven), s_p, b.fmul(dodd, c_p))
            both = b.shuffle_vector(first, second, lanes(n // 2 + n % 2 * (W // 2) for n in range(W)))
            out.store(both, out.at(at))

    with b.if_else(more.given) as (given, alone):
        with given:
            write(True)
        with alone:
            write(False)


@njit(**OPTIONS)
def rotate_pairs_vjp(x: Any, dx: Any, more: Any, f: Any, c: Any, s: Any, dangle: Any) -> None:
    """dangle_p += x_2p dx_2p+1 - x_2p+1 dx_2p of a rotated row x;  dx <- dx + f more, its pairs rotated back."""
    P, each = len(c), BYTES // dx.itemsize // 2
    whole = P // each * each
    rotate_vectors_vjp(x, dx, more, f, c, s, whole, dangle, dx)
    for p in range(whole, P):
        even, odd = dx[2 * p], dx[2 * p + 1]
        dangle[p] += x[2 * p] * odd - x[2 * p + 1] * even
        if len(more):
            even, odd = even + f * more[2 * p], odd + f * more[2 * p + 1]
        dx[2 * p] = even * c[p] + odd * s[p]
        dx[2 * p + 1] = odd * c[p] - even * s[p]


@piece(of="rotated")
def rotated(x: Vector, c: Vector, s: Vector, back: Whole, out: Vector):
    """The pairs of a row rotated, its other channels as they are."""
    rotate_pairs(x, c, s, back, out)
    for j in range(2 * len(c), len(out)):
        out[j] = x[j]


@piece(of="rotated_pair")
def rotated_pair(x: Vector, c: Vector, s: Vector, back: Whole, out: Vector):
    """Two rows of one width side by side, all of their columns rotated by one angle."""
    n, cosine, sine = len(out) // 2, c[0], -s[0] if back else s[0]
    for j in range(n):
        even, odd = x[j], x[n + j]
        out[j] = even * cosine - odd * sine
        out[n + j] = even * sine + odd * cosine


@piece(of="angle_of_pair")
def angle_of_pair(x: Vector, y: Vector, factor: Number, out: Vector):
    """factor (<x_even, y_odd> - <x_odd, y_even>) of rows side by side: the gradient of the angle that led to x"""
    n = len(x) // 2
    even, odd, d_even, d_odd = rows(x, 0, n), rows(x, n, n), rows(y, 0, n), rows(y, n, n)
    out[0] = factor * (dot(even, d_odd, n) - dot(odd, d_even, n))


@piece(of="quotient")
def quotient(x: Vector, y: Vector, eps: Number, out: Vector):
    """x_1 .. x_n over x_{n+1} + eps, or over max(|x_{n+1}|, y); 0 where that is 0"""
    n = len(out)
    total = max(abs(x[n]), y[0]) if len(y) else x[n] + eps
    for j in range(n):
        out[j] = x[j] / total if total != 0 else number(out, 0)


@piece(of="normed")
def normed(x: Vector, y: Vector, z: Vector, root: Number, out: Vector):
    """y (x - m) / sqrt(mean (x - m)^2 + eps) + z, m = mean x, root^2 = n eps; no y: 1, no z: 0"""
    n = len(out)
    mean = sum_of(x, n) / number(x, n)
    for j in range(n):
        out[j] = x[j] - mean
    length, factor = length_of(out, n, root)
    size = np.sqrt(number(x, n))
    for j in range(n):
        out[j] = factor * out[j] * (size / length)
    for j in range(len(y)):
        out[j] *= y[j]
    for j in range(len(z)):
        out[j] += z[j]


@piece(of="over_length")
def over_length(x: Vector, y: Vector, root: Number, out: Vector):
    """x / sqrt(|y|^2 + root^2); x where that is 0"""
    length, factor = length_of(y, len(y), root)
    for j in range(len(out)):
        out[j] = x[j] * (factor / length)


@piece(of="over_length_vjp")
def over_length_vjp(x: Vector, y: Vector, z: Vector, root: Number, out: Vector):
    """-y <z, x> / n^3, n = sqrt(|y|^2 + root^2): the gradient of y through the length in over_length"""
    length, factor = length_of(y, len(y), root)
    along = dot(z, x, len(x)) * (factor / length)
    for j in range(len(out)):
        out[j] = -(factor * y[j] / length) * along * (factor / length)


@piece(of="softmax")
def softmax(x: Vector, negative: Whole, out: Vector):
    """e^{x_j} over their sum, or e^{-x_j}"""
    n, sign = len(out), number(out, -1 if negative else 1)
    for j in range(n):
        out[j] = sign * x[j]
    most = max_of(out, n)
    for j in range(n):
        out[j] = exp(out[j] - most)
    over = number(out, 1) / sum_of(out, n)
    for j in range(n):
        out[j] *= over


@piece(of="dpfp")
def dpfp(x: Vector, nu: Whole, out: Vector):
    """r_i r_{i-1}, then r_i r_{i-2}, ..., r_i r_{i-nu}, of r = [max(x, 0), max(-x, 0)]; before r_0 is the last r"""
    n, none = len(x), number(out, 0)
    for j in range(nu):
        for i in range(2 * n):
            before = (i - j - 1) % (2 * n)
            r, s = x[i] if i < n else -x[i - n], x[before] if before < n else -x[before - n]
            out[2 * n * j + i] = (r if r > 0 else none) * (s if s > 0 else none)


@piece(of="dpfp_vjp")
def dpfp_vjp(x: Vector, y: Vector, nu: Whole, out: Vector):
    """The product rule: dr_i = sum over j of y_ij r_{i-j} + y_{i+j,j} r_{i+j}, y_ij the gradient of r_i r_{i-j}"""
    n, none = len(x), number(out, 0)
    for i in range(n):
        half, total = 0 if x[i] > 0 else n, none
        for j in range(nu):
            at = i + half
            before, after = (at - j - 1) % (2 * n), (at + j + 1) % (2 * n)
            r, s = x[before] if before < n else -x[before - n], x[after] if after < n else -x[after - n]
            total += y[2 * n * j + at] * (r if r > 0 else none)
            total += y[2 * n * j + after] * (s if s > 0 else none)
        out[i] = total if x[i] > 0 else (-total if x[i] < 0 else none)


SERIES = tuple((-1) ** n * n / factorial(n + 1) for n in range(1, 12))  # of f', f(x) = (1 - e^{-x}) / x
flow_slope_series = series(*SERIES)
NEAR = 0.1  # up to there the series; from there on a difference that loses one digit


@piece(of="strength_vjp")
def strength_vjp(x: Vector, y: Vector, z: Vector, how: Whole, out: Vector):
    """z times the derivative of strength by y, or, how & 2, twice that by s = |x|^2; how & 1: of an implicit step"""
    beta, one = y[0], number(out, 1)
    step = beta * dot(x, x, len(x))
    if how & 1:
        b = beta / (one + step)
        slope = -2 * b * b if how & 2 else one / ((one + step) * (one + step))
    elif how & 2:
        fade = exp(-step)
        f = flow_slope_series(step) if abs(step) < NEAR else (fade + expm1(-step) / step) / step
        slope = 2 * beta * beta * f
    else:
        slope = exp(-step)
    out[0] = z[0] * number(out, slope)


@piece(of="softmax_vjp")
def softmax_vjp(x: Vector, y: Vector, out: Vector):
    """x (y - <x, y>), x = softmax"""
    n = len(out)
    along = dot(x, y, n)
    for j in range(n):
        out[j] = x[j] * (y[j] - along)


@piece(of="inner")
def inner(x: Vector, y: Vector, z: Vector, u: Vector, out: Vector):
    """<x, y> + z u; no z: 0, no u: 1"""
    more = z[0] * (u[0] if len(u) else number(out, 1)) if len(z) else number(out, 0)
    out[0] = dot(x, y, len(y)) + more


@piece(of="quotient_vjp")
def quotient_vjp(x: Vector, y: Vector, z: Vector, eps: Number, out: Vector):
    """[y / m, -sign(d) <y / m, n> / m where |d| > z] of x = [n, d], m = max(|d|, z); 0 for m = 0

    No z: [y / m, -<y / m, n> / m], m = d + eps.
    """
    n = len(y)
    d, none, signed = x[n], number(out, 0), len(z) == 0
    size = d + eps if signed else -d if d < 0 else d
    over = size if signed or size > z[0] else z[0]
    share = number(out, 1) / over if over != 0 else none
    for j in range(n):
        out[j] = share * y[j]
    along = dot(out, x, n) * share
    if signed:
        out[n] = -along
    else:
        out[n] = (along if d < 0 else -along) if size > z[0] else none


@piece(of="strength")
def strength(x: Vector, y: Vector, implicit: Whole, out: Vector):
    """Of s = |x|^2 and y: (1 - e^{-y s}) / s, y for s = 0, or of an implicit step y / (1 + y s)"""
    step = y[0] * dot(x, x, len(x))
    if implicit:
        out[0] = y[0] / (number(out, 1) + step)
    else:
        out[0] = y[0] if step == 0 else y[0] * (-expm1(-step) / step)


# a zero-order hold (ops/zero_order_hold.py): z = dt A, b = (e^z - 1) / A; pairs of numbers are complex ones

NEAR_HOLD, TERMS = 0.5, 14  # |z| up to which a difference that cancels is a series; its terms


@njit(**OPTIONS)
def of_system(dt: Any, log_rate: Any, w: Any) -> Any:
    """Re A, the parts of e^z - 1, exact near 0, and those of 1 / A."""
    one = dt / dt
    r = -exp(log_rate)
    less, (s, c) = expm1(dt * r), sine_cosine((one / (one + one)) * dt * w)
    two = s * s + s * s
    most = max(abs(r), abs(w))
    a, b = r / most, w / most
    over = one / (most * (a * a + b * b))
    return r, less * (one - two) - two, (less + one) * (s * c + s * c), a * over, -b * over


@piece(of="hold")
def hold(x: Vector, y: Vector, z: Vector, out: Vector):
    """The pairs of z, then those of b; x: log dt, y: log -Re A, z: Im A"""
    N, dt = len(y), exp(x[0])
    steps, gains = rows(out, 0, 2 * N), rows(out, 2 * N, 2 * N)
    for n in range(N):
        r, re, im, p, q = of_system(dt, y[n], z[n])
        steps[2 * n], steps[2 * n + 1] = dt * r, dt * z[n]
        gains[2 * n], gains[2 * n + 1] = re * p - im * q, re * q + im * p


@piece(of="hold_vjp")
def hold_vjp(x: Vector, y: Vector, z: Vector, u: Vector, out: Vector):
    """The gradients of y and z, and the terms of that of x, from those of z and b, which u has one after the other"""
    N, dt, one = len(y), exp(x[0]), number(out, 1)
    dsteps, dgains = rows(u, 0, 2 * N), rows(u, 2 * N, 2 * N)
    drates, dangles, dlog = rows(out, 0, N), rows(out, N, N), rows(out, 2 * N, N)
    for n in range(N):
        r, re, im, p, q = of_system(dt, y[n], z[n])
        w, v, s, t = dt * r, dt * z[n], one, number(out, 0)
        for k in range(TERMS, 0, -1):
            ratio = number(out, (k + 1) / (k * (k + 2)))
            s, t = one + ratio * (w * s - v * t), ratio * (w * t + v * s)
        half = dt * dt / (one + one)
        a, b = dt * (re + one) - (re * p - im * q), dt * im - (re * q + im * p)  # dt e^z - b
        is_near = w * w + v * v < NEAR_HOLD * NEAR_HOLD
        a, b = (half * s, half * t) if is_near else (a * p - b * q, a * q + b * p)  # db / dA
        e, f, g, h = dsteps[2 * n], dsteps[2 * n + 1], dgains[2 * n], dgains[2 * n + 1]
        drates[n] = r * (dt * e + (g * a + h * b))
        dangles[n] = dt * f + (h * a - g * b)
        dlog[n] = dt * ((e * r + f * z[n]) + (g * (re + one) + h * im))
