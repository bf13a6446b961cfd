"""Data pointers of NumPy arrays for compiled code, without `__array_interface__`.

Reading `__array_interface__` takes one to two microseconds per array, a large part of a decoding step. In NumPy's C ABI
the data pointer follows the object header, where compiled code reads it: a handle is the address of that pointer. On
interpreters with another object layout the pointers are read from the arrays and stored in the table itself.
"""

from __future__ import annotations

import functools
from array import array
from ctypes import c_int64

import numpy as np

HEADER = object.__basicsize__


def address(y: np.ndarray) -> int:
    """Address of the first element."""
    return y.__array_interface__["data"][0]


@functools.cache
def _is_behind_the_head() -> bool:
    made = [np.arange(3.0), np.arange(6).reshape(2, 3)[:, ::-1]]
    return all(c_int64.from_address(id(y) + HEADER).value == address(y) for y in made)


def handles(arrays: list[np.ndarray]) -> array[int]:
    """A table of handles, and a 0 that compiled code writes to; the arrays must outlive it."""
    if _is_behind_the_head():
        return array("q", [*[id(y) + HEADER for y in arrays], 0])
    count = len(arrays)
    row = array("q", [*[0] * count, 0, *[address(y) for y in arrays]])
    for i in range(count):
        row[i] = place(row) + 8 * (count + 1 + i)
    return row


def place(row: array[int]) -> int:
    """Address of a table."""
    return row.buffer_info()[0]
