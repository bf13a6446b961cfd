"""Small states in compiled loops: a panel of value channels at a time, from and to the rows as they are packed.

A panel has all keys of its channels, so that their scales, and sums of products with the state, are whole in it: the
bits do not depend on how a state is cut. `w.held` has room for a panel, or for all of a head if many tokens read it.
Pieces "of small" are loaded for such states alone, always in float32. log_work.py declares what they work on.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..ops.cpu.numbers import number, size_of
from ..ops.cpu.products import product
from ..ops.cpu.rows import clear
from ..runtime.pieces.codes import codes_of, round_to
from ..runtime.pieces.piece import Matrix, Number, Truth, Whole, piece
from ..runtime.pieces.registers import LINE, NARROW, at_least, fma, registers, store, times, where_positive
from ..runtime.pieces.tiles import dot, sum_of
from ..runtime.pieces.vectors import BYTES, lane
from ..runtime.pieces.views import columns, prefetch_line, row, rows, start_of
from .log_work import Work

SURE = 1e30  # sums of numbers whose squares have this sum are finite in float32


def panel(dtype: Any) -> int:
    """Value channels of a panel."""
    return NARROW * lane(dtype)


(zeros, load), codes = registers(1), codes_of(1)
(panel_zeros, load_panel), panel_codes = registers(NARROW), codes_of(NARROW)


@piece
def code_at(w: Work, i: Whole, d: Whole) -> Number:
    """One code: of row i and channel d."""
    if w.bits == 16:
        return number(w.held, w.whole[i, d])
    high = number(w.held, w.upper[i, d])
    return high if w.bits == 8 else number(w.held, 16) * high + number(w.held, (w.low[i, d // 2] >> (4 * (d % 2))) & 15)


@piece
def round_one(x: Number, w: Work, i: Whole, d: Whole):
    """The inverse."""
    code = np.int64(np.rint(x))
    if w.bits == 16:
        w.whole[i, d] = np.int16(code)
    elif w.bits == 8:
        w.upper[i, d] = np.int8(code)
    else:
        four = (code & 15) << (4 * (d % 2))
        w.upper[i, d] = np.int8(code >> 4)
        w.low[i, d // 2] = np.uint8(four if d % 2 == 0 else w.low[i, d // 2] | four)


@piece(of="small")
def unpack(w: Work, first: Whole, to: Matrix):
    """to = the channels of this head's state from `first` on."""
    scale, n, lane = row(w.scales, w.base // w.K), to.shape[1], BYTES // to.itemsize
    whole = n // lane * lane
    for j in range(w.K):
        x, i = row(to, j), w.base + j
        for d in range(0, whole, lane):
            y = codes(w.bits, w.whole, w.upper, w.low, i, first + d, to)
            store(times(y, load(scale, first + d)), x, d)
        for d in range(whole, n):
            x[d] = code_at(w, i, first + d) * scale[first + d]


@piece
def pack(w: Work, first: Whole, x: Matrix):
    """The channels of this head's state from `first` on = x, rounded."""
    largest, scale, most = row(w.found, 0), row(w.scales, w.base // w.K), number(x, 2 ** (w.bits - 1) - 1)
    n, lane = x.shape[1], BYTES // x.itemsize
    whole = n // lane * lane
    for d in range(0, whole, lane):
        size = zeros(largest)
        for j in range(w.K):
            size = at_least(size_of(load(row(x, j), d)), size)
        store(size / most, scale, first + d)
        size = where_positive(size, size, number(x, 1))
        for j in range(w.K):
            code = times(load(row(x, j), d) / size, most)
            round_to(code, w.bits, w.whole, w.upper, w.low, w.base + j, first + d)
    for d in range(whole, n):
        size = number(x, 0)
        for j in range(w.K):
            size = max(size, abs(x[j, d]))
        scale[first + d] = size / most
        size = size if size != 0 else number(x, 1)
        for j in range(w.K):
            round_one(times(x[j, d] / size, most), w, w.base + j, first + d)


@piece
def is_finite(w: Work, x: Matrix) -> Truth:
    """Whether x, of K rows, has no inf and no NaN."""
    zero, n = row(w.found, 0), x.shape[1]
    clear(rows(w.found, 0, 1))
    for j in range(w.K):
        y = row(x, j)
        for d in range(n):
            zero[d] += y[d] * 0  # NaN of inf and NaN
    return sum_of(zero, n) == 0


@piece(of="small")
def is_surely_finite(w: Work, n: Whole) -> Truth:
    """Whether the state after n tokens is finite because its terms are small: |scale codes| and |k_j| |u_j|."""
    scale, factors, most = row(w.scales, w.base // w.K), row(w.readers, 0), number(w.held, 2 ** (w.bits - 1) - 1)
    squares = most * most * dot(scale, scale, w.V) * dot(factors, factors, w.K)
    for i in range(n):
        k, u = row(w.faded, i), row(w.writes, i)
        squares += dot(k, k, w.K) * dot(u, u, w.V)
    return squares < SURE  # not of NaN


@piece
def add_panel(w: Work, x: Whole, y: Whole, d: Whole):
    """found_x, found_y += readers_x, readers_y times the panel from channel d on."""
    a, b, to, other, i = row(w.readers, x), row(w.readers, y), row(w.found, x), row(w.found, y), w.base
    scale, first, second = load_panel(row(w.scales, i // w.K), d), panel_zeros(a), panel_zeros(a)
    for j in range(w.K):
        if w.bits == 16:
            prefetch_line(start_of(w.whole, i + w.K + j) + 2 * d)
            prefetch_line(start_of(w.whole, i + w.K + j) + 2 * d + LINE)
        else:
            prefetch_line(start_of(w.upper, i + w.K + j) + d)
        S = times(panel_codes(w.bits, w.whole, w.upper, w.low, i + j, d, a), scale)
        first, second = fma(a[j], S, first), fma(b[j], S, second)
    first, second = load_panel(to, d) + first, load_panel(other, d) + second  # x may be y
    store(first, to, d)
    store(second, other, d)


@piece(of="small")
def add_read(w: Work, first: Whole, count: Whole):
    """found += readers times this head's state, of so many readers from `first` on."""
    readers, found = rows(w.readers, first, count), rows(w.found, first, count)
    if w.unpacked:
        product(0, readers, w.held, found, added=found)
    else:
        wide = NARROW * (BYTES // found.itemsize)
        for d in range(0, w.V, wide):
            if d + wide <= w.V:
                for x in range(first, first + count, 2):
                    add_panel(w, x, min(x + 1, first + count - 1), d)
            else:
                held, to = columns(w.held, 0, w.V - d), columns(found, d, w.V - d)
                unpack(w, d, held)
                product(0, readers, held, to, added=to)
