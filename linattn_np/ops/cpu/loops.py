"""Loops for all maps of rows: four vectors at a time in registers, then one, the last one cut off at the end.

    over(f, x, y, z, numbers, out)                 out = f(x, y, z, numbers)
    sums = sweep(f, rows, numbers, outs)           *outs, terms = f(rows, numbers), sums = sum of the terms

f is a formula on vectors, compiled into the loop; an array that it does not use is any other one, which is not read.
Constants are loaded once for four vectors, and no array is compared with another one for overlap: out may be x, y or z.
A number has the same bits wherever it lies in a row.
"""

from __future__ import annotations

from typing import Any

from numba import njit

from ...runtime.pieces.registers import NARROW, folded, load_part, registers, store, store_part, total
from ...runtime.pieces.vectors import BYTES
from .numbers import OPTIONS

zeros, load = registers(NARROW)
zero, _ = registers(1)


@njit(**OPTIONS)
def over(f: Any, x: Any, y: Any, z: Any, numbers: Any, out: Any) -> None:
    """out = f(x, y, z, numbers)"""
    one = BYTES // out.itemsize
    whole = len(out) // (NARROW * one) * (NARROW * one)
    for j in range(0, whole, NARROW * one):
        store(f(load(x, j), load(y, j), load(z, j), numbers), out, j)
    for j in range(whole, len(out), one):
        store_part(f(load_part(x, j), load_part(y, j), load_part(z, j), numbers), out, j)


@njit(**OPTIONS)
def sweep(f: Any, rows: Any, numbers: Any, outs: Any) -> Any:
    """The sum of the last vector of f(five rows, numbers) over the row; the first three are written to `outs`."""
    a, b, c, d, e = rows
    o, p, q = outs
    one, terms, rest = BYTES // o.itemsize, zeros(o), zero(o)
    whole = len(o) // (NARROW * one) * (NARROW * one)
    for j in range(0, whole, NARROW * one):
        x, y, z, s = f(load(a, j), load(b, j), load(c, j), load(d, j), load(e, j), numbers)
        store(x, o, j)
        store(y, p, j)
        store(z, q, j)
        terms = terms + s
    for j in range(whole, len(o), one):
        x, y, z, s = f(load_part(a, j), load_part(b, j), load_part(c, j), load_part(d, j), load_part(e, j), numbers)
        store_part(x, o, j)
        store_part(y, p, j)
        store_part(z, q, j)
        rest = rest + s
    return total(folded(terms) + rest)
