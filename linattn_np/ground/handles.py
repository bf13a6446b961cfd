"""Where the numbers of a NumPy array lie, told to compiled code without asking the array.

Asking takes a microsecond or two an array, for a step of decoding a good part of it. NumPy's C ABI puts the address of
the first element right behind the head that every Python object has, so that there compiled code finds it: a handle is
the address of an address. Where an interpreter keeps objects otherwise, addresses are asked for and put in a row.
"""

from __future__ import annotations

import functools
from array import array
from ctypes import c_int64

import numpy as np

HEAD = object.__basicsize__


def address(y: np.ndarray) -> int:
    """Of the first element."""
    return y.__array_interface__["data"][0]


@functools.cache
def _is_behind_the_head() -> bool:
    made = [np.arange(3.0), np.arange(6).reshape(2, 3)[:, ::-1]]
    return all(c_int64.from_address(id(y) + HEAD).value == address(y) for y in made)


def handles(arrays: list[np.ndarray]) -> array[int]:
    """A row of the handles of some arrays, and a 0 for compiled code to write to; the arrays must outlive it."""
    if _is_behind_the_head():
        return array("q", [*[id(y) + HEAD for y in arrays], 0])
    count = len(arrays)
    row = array("q", [*[0] * count, 0, *[address(y) for y in arrays]])
    for i in range(count):
        row[i] = place(row) + 8 * (count + 1 + i)
    return row


def place(row: array[int]) -> int:
    """Where a row lies."""
    return row.buffer_info()[0]
