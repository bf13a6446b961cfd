"""The functions of block_rows.py for complex channels: real part and imaginary part side by side.

The gradient of a_ij is p_i h_j*, the next p_j is sum_i a_ij* p_i.
"""

from __future__ import annotations

from typing import Any

from numba import njit

from ...ops.cpu.numbers import OPTIONS, number
from ...runtime.pieces.registers import fma
from .block_rows import hold


@njit(**OPTIONS)
def of_factor(re: Any, im: Any, b: Any, c: Any, before: Any) -> Any:
    """p h*"""
    return fma(re, b, im * c), fma(im, b, -(re * c))


@njit(**OPTIONS)
def of_constant(re: Any, im: Any, b: Any, c: Any, before: Any) -> Any:
    return fma(im, c, fma(re, b, before[0])), fma(-re, c, fma(im, b, before[1]))


@njit(**OPTIONS)
def along(a: Any, m: Any, b: Any, c: Any, p: Any, q: Any, y: Any, z: Any) -> Any:
    """y + iz + a_m (b + ic) + a_{m+1} (p + iq)"""
    y, z = fma(-a[2 * m + 1], c, fma(a[2 * m], b, y)), fma(a[2 * m + 1], b, fma(a[2 * m], c, z))
    return fma(-a[2 * m + 3], q, fma(a[2 * m + 2], p, y)), fma(a[2 * m + 3], p, fma(a[2 * m + 2], q, z))


@njit(**OPTIONS)
def across(a: Any, m: Any, b: Any, c: Any, p: Any, q: Any) -> Any:
    """a_m* (b + ic) + a_{m+2}* (p + iq)"""
    y, z = fma(a[2 * m + 1], c, a[2 * m] * b), fma(-a[2 * m + 1], b, a[2 * m] * c)
    return fma(a[2 * m + 5], q, fma(a[2 * m + 4], p, y)), fma(-a[2 * m + 5], p, fma(a[2 * m + 4], q, z))


@njit(**OPTIONS)
def keep(a: Any, x: Any, h: Any, out: Any, N: Any) -> None:
    if N == 2:
        for k in range(len(out) // 4):
            b, c, p, q = h[4 * k], h[4 * k + 1], h[4 * k + 2], h[4 * k + 3]
            first = along(a, 4 * k, b, c, p, q, x[4 * k], x[4 * k + 1])
            second = along(a, 4 * k + 2, b, c, p, q, x[4 * k + 2], x[4 * k + 3])
            out[4 * k], out[4 * k + 1] = first
            out[4 * k + 2], out[4 * k + 3] = second
        return
    for k in range(0, len(out) // 2, N):
        for i in range(k, k + N):
            y, z = x[2 * i], x[2 * i + 1]
            for j in range(N):
                u, v = a[2 * (i * N + j)], a[2 * (i * N + j) + 1]
                re, im = h[2 * (k + j)], h[2 * (k + j) + 1]
                y, z = fma(-v, im, fma(u, re, y)), fma(v, re, fma(u, im, z))
            out[2 * i], out[2 * i + 1] = y, z


@njit(**OPTIONS)
def step(a: Any, x: Any, h: Any, out: Any, scale: Any, N: Any) -> None:
    keep(a, x, h, out, N)
    hold(out, h, scale)


@njit(**OPTIONS)
def back(d: Any, a: Any, dout: Any, p: Any, dx: Any, dgate: Any, scale: Any, N: Any) -> None:
    if N == 2:
        for k in range(len(dx) // 4):
            i, m = 4 * k, 8 * k
            b, c, e, f = dx[i], dx[i + 1], dx[i + 2], dx[i + 3]
            y, z = fma(scale, dout[i], p[i]), fma(scale, dout[i + 1], p[i + 1])
            s, t = fma(scale, dout[i + 2], p[i + 2]), fma(scale, dout[i + 3], p[i + 3])
            dgate[m], dgate[m + 1] = d(y, z, b, c, (dgate[m], dgate[m + 1]))
            dgate[m + 2], dgate[m + 3] = d(y, z, e, f, (dgate[m + 2], dgate[m + 3]))
            dgate[m + 4], dgate[m + 5] = d(s, t, b, c, (dgate[m + 4], dgate[m + 5]))
            dgate[m + 6], dgate[m + 7] = d(s, t, e, f, (dgate[m + 6], dgate[m + 7]))
            dx[i], dx[i + 1], dx[i + 2], dx[i + 3] = y, z, s, t
            p[i], p[i + 1] = across(a, 4 * k, y, z, s, t)
            p[i + 2], p[i + 3] = across(a, 4 * k + 1, y, z, s, t)
        return
    for k in range(0, len(dx) // 2, N):
        for i in range(k, k + N):
            re, im = fma(scale, dout[2 * i], p[2 * i]), fma(scale, dout[2 * i + 1], p[2 * i + 1])
            for j in range(N):
                m = 2 * (i * N + j)
                before = dgate[m], dgate[m + 1]
                dgate[m], dgate[m + 1] = d(re, im, dx[2 * (k + j)], dx[2 * (k + j) + 1], before)
            p[2 * i], p[2 * i + 1] = re, im
        for i in range(2 * k, 2 * (k + N)):
            dx[i] = p[i]
        for j in range(N):
            y, z = number(p, 0), number(p, 0)
            for i in range(N):
                m = 2 * ((k + i) * N + j)
                u, v, re, im = a[m], a[m + 1], dx[2 * (k + i)], dx[2 * (k + i) + 1]
                y, z = fma(v, im, fma(u, re, y)), fma(-v, re, fma(u, im, z))
            p[2 * (k + j)], p[2 * (k + j) + 1] = y, z
