"""One loop for all maps of rows: four vectors at a time in registers, then one, the last one cut off at the end.

    over(f, x, y, z, numbers, out)        out = f(x, y, z, numbers)

f is a formula on vectors, compiled into the loop; an array that it does not use is any other one, which is not read.
Constants are loaded once for four vectors, and no array is compared with another one for overlap: out may be x, y or z.
A number has the same bits wherever it lies in a row.
"""

from __future__ import annotations

from typing import Any

from numba import njit

from ...runtime.pieces.registers import NARROW, load_part, registers, store, store_part
from ...runtime.pieces.vectors import BYTES
from .numbers import OPTIONS

_, load = registers(NARROW)


@njit(**OPTIONS)
def over(f: Any, x: Any, y: Any, z: Any, numbers: Any, out: Any) -> None:
    """out = f(x, y, z, numbers)"""
    one = BYTES // out.itemsize
    whole = len(out) // (NARROW * one) * (NARROW * one)
    for j in range(0, whole, NARROW * one):
        store(f(load(x, j), load(y, j), load(z, j), numbers), out, j)
    for j in range(whole, len(out), one):
        store_part(f(load_part(x, j), load_part(y, j), load_part(z, j), numbers), out, j)
