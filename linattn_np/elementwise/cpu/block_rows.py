"""The functions of rows.py for matrices of N neighbouring channels, whose rows lie one after the other in `a`.

    h_i <- sum_j a_ij h_j + x_i,   da_ij = p_i b_j,   p_j <- sum_i a_ij p_i

Each sum begins with the number it is added to and goes in the order of its index. Rows that are written serve as the
place of the new vectors until the old ones have been read.
"""

from __future__ import annotations

from typing import Any

from numba import njit

from ...ops.cpu.numbers import OPTIONS, number
from ...runtime.pieces.registers import fma


@njit(**OPTIONS)
def of_factor(p: Any, b: Any, before: Any) -> Any:
    return p * b


@njit(**OPTIONS)
def of_constant(p: Any, b: Any, before: Any) -> Any:
    return fma(p, b, before)


@njit(**OPTIONS)
def keep(a: Any, x: Any, h: Any, out: Any, N: Any) -> None:
    if N == 2:
        for k in range(len(out) // 2):
            y, z = h[2 * k], h[2 * k + 1]
            out[2 * k] = fma(a[4 * k + 1], z, fma(a[4 * k], y, x[2 * k]))
            out[2 * k + 1] = fma(a[4 * k + 3], z, fma(a[4 * k + 2], y, x[2 * k + 1]))
        return
    for k in range(0, len(out), N):
        for i in range(k, k + N):
            y = x[i]
            for j in range(N):
                y = fma(a[i * N + j], h[k + j], y)
            out[i] = y


@njit(**OPTIONS)
def hold(y: Any, h: Any, scale: Any) -> None:
    """h = y, y <- scale y"""
    for i in range(len(y)):
        h[i] = y[i]
        y[i] = scale * y[i]


@njit(**OPTIONS)
def step(a: Any, x: Any, h: Any, out: Any, scale: Any, N: Any) -> None:
    if N == 2:
        for k in range(len(out) // 2):
            y, z = h[2 * k], h[2 * k + 1]
            first = fma(a[4 * k + 1], z, fma(a[4 * k], y, x[2 * k]))
            second = fma(a[4 * k + 3], z, fma(a[4 * k + 2], y, x[2 * k + 1]))
            h[2 * k], h[2 * k + 1] = first, second
            out[2 * k], out[2 * k + 1] = scale * first, scale * second
        return
    keep(a, x, h, out, N)
    hold(out, h, scale)


@njit(**OPTIONS)
def back(d: Any, a: Any, dout: Any, p: Any, dx: Any, dgate: Any, scale: Any, N: Any) -> None:
    if N == 2:
        for k in range(len(dx) // 2):
            b, c = dx[2 * k], dx[2 * k + 1]
            y, z = fma(scale, dout[2 * k], p[2 * k]), fma(scale, dout[2 * k + 1], p[2 * k + 1])
            dgate[4 * k], dgate[4 * k + 1] = d(y, b, dgate[4 * k]), d(y, c, dgate[4 * k + 1])
            dgate[4 * k + 2], dgate[4 * k + 3] = d(z, b, dgate[4 * k + 2]), d(z, c, dgate[4 * k + 3])
            dx[2 * k], dx[2 * k + 1] = y, z
            p[2 * k] = fma(a[4 * k + 2], z, a[4 * k] * y)
            p[2 * k + 1] = fma(a[4 * k + 3], z, a[4 * k + 1] * y)
        return
    for k in range(0, len(dx), N):
        for i in range(k, k + N):
            own = fma(scale, dout[i], p[i])
            for j in range(N):
                dgate[i * N + j] = d(own, dx[k + j], dgate[i * N + j])
            p[i] = own
        for i in range(k, k + N):
            dx[i] = p[i]
        for j in range(k, k + N):
            y = number(p, 0)
            for i in range(N):
                y = fma(a[(k + i) * N + j - k], dx[k + i], y)
            p[j] = y
