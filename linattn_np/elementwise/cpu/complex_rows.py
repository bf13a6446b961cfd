"""The functions of rows.py for complex channels: real part and imaginary part side by side.

Of logarithms e^{u + iv} = e^u (cos v + i sin v). The gradient of a is p b*, the next p is a* p.
"""

from __future__ import annotations

from typing import Any

from numba import njit

from ...ops.cpu.numbers import OPTIONS, exp, sine_cosine
from ...runtime.pieces.registers import fma


@njit(**OPTIONS)
def power(g: Any, a: Any) -> None:
    """a = e^g; 0 where that is 0, whatever the angle."""
    for j in range(len(a) // 2):
        size, (sine, cosine) = exp(g[2 * j]), sine_cosine(g[2 * j + 1])
        a[2 * j] = size * cosine if size > 0 else size
        a[2 * j + 1] = size * sine if size > 0 else size


@njit(**OPTIONS)
def step(a: Any, x: Any, h: Any, out: Any, scale: Any) -> None:
    for j in range(len(out) // 2):
        u, v, re, im = a[2 * j], a[2 * j + 1], h[2 * j], h[2 * j + 1]
        y, z = fma(u, re, fma(-v, im, x[2 * j])), fma(u, im, fma(v, re, x[2 * j + 1]))
        h[2 * j], h[2 * j + 1] = y, z
        out[2 * j], out[2 * j + 1] = scale * y, scale * z


@njit(**OPTIONS)
def keep(a: Any, x: Any, h: Any, out: Any) -> None:
    for j in range(len(h) // 2):
        u, v, re, im = a[2 * j], a[2 * j + 1], h[2 * j], h[2 * j + 1]
        out[2 * j], out[2 * j + 1] = fma(u, re, fma(-v, im, x[2 * j])), fma(u, im, fma(v, re, x[2 * j + 1]))


@njit(**OPTIONS)
def of_factor(u: Any, v: Any, re: Any, im: Any, before: Any) -> Any:
    return re, im


@njit(**OPTIONS)
def of_log(u: Any, v: Any, re: Any, im: Any, before: Any) -> Any:
    return fma(u, re, v * im), fma(u, im, -(v * re))


@njit(**OPTIONS)
def of_constant(u: Any, v: Any, re: Any, im: Any, before: Any) -> Any:
    return before[0] + re, before[1] + im


@njit(**OPTIONS)
def back(d: Any, a: Any, dout: Any, p: Any, dx: Any, dgate: Any, scale: Any) -> None:
    for j in range(len(dx) // 2):
        u, v, b, c = a[2 * j], a[2 * j + 1], dx[2 * j], dx[2 * j + 1]
        re, im = fma(scale, dout[2 * j], p[2 * j]), fma(scale, dout[2 * j + 1], p[2 * j + 1])
        before = dgate[2 * j], dgate[2 * j + 1]
        dgate[2 * j], dgate[2 * j + 1] = d(u, v, fma(re, b, im * c), fma(im, b, -(re * c)), before)
        dx[2 * j], dx[2 * j + 1] = re, im
        p[2 * j], p[2 * j + 1] = fma(u, re, v * im), fma(u, im, -(v * re))
