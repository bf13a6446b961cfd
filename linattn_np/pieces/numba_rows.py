"""Rows of numbers: loading any storage dtype at any stride, sums and products of rows."""

from __future__ import annotations

import numpy as np
from numba.extending import intrinsic

from .numba_jit import apart, jit
from .numba_tiles import as_column, line, row

STORAGE = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 3}
TINY = 1e-36  # factors below it are dropped before they become subnormal, which processors multiply slowly


@intrinsic
def _bits(context, x, like):
    """The bits of x, read as a number of the type of `like`."""

    def emit(context, b, signature, given):
        return b.bitcast(given[0], context.get_value_type(signature.args[1]))

    return like(x, like), emit


@jit
def _half(h):
    """float16 bits as float32, subnormals exact."""
    magnitude = np.uint32(np.uint32(h & np.uint16(0x7FFF)) << np.uint32(13))
    y = _bits(magnitude, np.float32(0)) * np.float32(2.0**112)
    if (h & np.uint16(0x7C00)) == np.uint16(0x7C00):
        y = _bits(np.uint32(magnitude | np.uint32(0x70000000)), np.float32(0))
    return -y if (h & np.uint16(0x8000)) != 0 else y


@jit
def _brain(h):
    """bfloat16 bits as float32."""
    return _bits(np.uint32(np.uint32(h) << np.uint32(16)), np.float32(0))


@jit
def load_row(out, n, storage, at, step):
    """out[:n] from n numbers of a storage dtype, `step` bytes apart."""
    apart()
    if storage == 0 and step == 4:
        x = line(np.float32(0), at, n)
        for d in range(n):
            out[d] = x[d]
    elif storage == 1 and step == 8:
        y = line(np.float64(0), at, n)
        for d in range(n):
            out[d] = y[d]
    elif storage == 2 and step == 2:
        h = line(np.uint16(0), at, n)
        for d in range(n):
            out[d] = _half(h[d])
    elif storage == 3 and step == 2:
        h = line(np.uint16(0), at, n)
        for d in range(n):
            out[d] = _brain(h[d])
    else:
        for d in range(n):
            if storage == 0:
                out[d] = line(np.float32(0), at + d * step, 1)[0]
            elif storage == 1:
                out[d] = line(np.float64(0), at + d * step, 1)[0]
            elif storage == 2:
                out[d] = _half(line(np.uint16(0), at + d * step, 1)[0])
            else:
                out[d] = _brain(line(np.uint16(0), at + d * step, 1)[0])


@jit
def load(one, out, m, n, storage, at, row_step, step):
    """out (m, n) from memory, rows `row_step` bytes apart, numbers `step` bytes."""
    apart()
    for i in range(m):
        load_row(row(one, out, i, n), n, storage, at + i * row_step, step)


@jit
def put(one, X, factors, m, n, at, row_step, more):
    """Rows factors_i X_i to memory, `row_step` bytes apart; added to what is there if `more`."""
    apart()
    for i in range(m):
        x, y, f = row(one, X, i, n), line(one, at + i * row_step, n), row(one, as_column(factors), i, 1)[0]
        if more:
            for d in range(n):
                y[d] += f * x[d]
        else:
            for d in range(n):
                y[d] = f * x[d]


@jit
def clear(one, out, begin, end, n):
    """Rows begin..end of out are zero."""
    for i in range(begin, end):
        x = row(one, out, i, n)
        for d in range(n):
            x[d] = 0


@jit
def times(one, X, F, m, n, out):
    """out = X (.) F, all (m, n)."""
    apart()
    for i in range(m):
        x, f, y = row(one, X, i, n), row(one, F, i, n), row(one, out, i, n)
        for d in range(n):
            y[d] = x[d] * f[d]


@jit
def add_times(one, X, F, m, n, out):
    """out += X (.) F, all (m, n)."""
    apart()
    for i in range(m):
        x, f, y = row(one, X, i, n), row(one, F, i, n), row(one, out, i, n)
        for d in range(n):
            y[d] += x[d] * f[d]


@jit
def scaled(one, X, factors, m, n, out):
    """out_i = factors_i X_i"""
    apart()
    for i in range(m):
        x, y, f = row(one, X, i, n), row(one, out, i, n), row(one, as_column(factors), i, 1)[0]
        for d in range(n):
            y[d] = f * x[d]


@jit
def add_dots(one, out, X, Y, m, n, below, sign):
    """out_i += sign X_i . Y_i, over columns j < i only if `below`."""
    apart()
    for i in range(m):
        k = i if below else n
        row(one, out, i, 1)[0] += sign * dot(one - one, row(one, X, i, k), row(one, Y, i, k), k)


@jit(reorder=True)
def dot(zero, x, y, n):
    """x . y"""
    total = zero
    for d in range(n):
        total += x[d] * y[d]
    return total


@jit(reorder=True)
def fade_and_dot(zero, p, w, x, n):
    """p <- p (.) w, then p . x"""
    total = zero
    for d in range(n):
        y = p[d] * w[d]
        p[d] = y
        total += y * x[d]
    return total
