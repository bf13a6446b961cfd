"""Where the numbers of a NumPy array lie, told to compiled code without asking the array.

Asking takes a microsecond or two an array, for a step of decoding a good part of it. NumPy's C ABI puts the address of
the first element right behind the head that every Python object has, so that there compiled code finds it: a handle is
the address of an address. Where an interpreter keeps objects otherwise, addresses are asked for and put in a row.
"""

from __future__ import annotations

import functools
from ctypes import addressof, c_int64
from typing import Any

import numpy as np

HEAD = object.__basicsize__


def address(y: np.ndarray) -> int:
    """Of the first element."""
    return y.__array_interface__["data"][0]


@functools.cache
def _is_behind_the_head() -> bool:
    made = [np.arange(3.0), np.arange(6).reshape(2, 3)[:, ::-1]]
    return all(c_int64.from_address(id(y) + HEAD).value == address(y) for y in made)


@functools.cache
def _row_of(count: int) -> Any:
    return c_int64 * count


def handles(arrays: list[np.ndarray]) -> Any:
    """A row of the handles of some arrays, as ctypes has it; the arrays must outlive it."""
    if _is_behind_the_head():
        return _row_of(len(arrays))(*[id(y) + HEAD for y in arrays])
    count = len(arrays)
    row = _row_of(2 * count)(*[0] * count, *[address(y) for y in arrays])
    row[:count] = [addressof(row) + 8 * (count + i) for i in range(count)]
    return row
