"""Workspaces: the inputs of a kernel and its scratch memory, as one argument with named fields.

A workspace is a table of 64-bit whole numbers. Fields of a declaration, in the order of the table:

    wholes    sizes, positions, flags: w.T
    numbers   w.scale; stored as float64
    arrays    of the call, any storage dtype and strides: w.q (`load` and `save` move their rows)
    matrices  in own memory: w.E is an array (rows, columns), whose sizes are fields too; a slot moves it

In Python the same table is read by `PythonWorkspace`, whose fields are NumPy arrays: kernels run there unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from .memory import ALIGNED, up
from .vectors import lane

AT, BATCH, TOKEN, HEAD, CHANNEL, SHARED, STORAGE, BATCHES, TOKENS, HEADS, CHANNELS = range(11)  # of an array
ARRAY = 11


Layout = tuple[np.ndarray, list[int], int]  # table, fields of it that are places, bytes: see Workspace.layout


class Matrix(NamedTuple):
    """A declaration: sizes by field name; `slot`: the field that says which slot."""

    rows: str
    columns: str = ""  # "": a vector
    before: str = ""  # a size: one row precedes row 0, and NAME_before is the matrix that starts there
    slot: str = ""
    alias: str = ""  # shares the memory of another field, starting at row `first` and a column
    first: int = 0
    left: str = ""
    dtype: str = ""  # if it is not the dtype of the computation
    of: frozenset[str] = frozenset()  # words that name the calls in which it has memory


class Workspace:
    """A declaration of fields."""

    is_shared = True

    def __init__(self, name: str, wholes: tuple[str, ...], numbers: tuple[str, ...], arrays: tuple[str, ...],
                 matrices: Mapping[str, Mapping[str, Matrix]]):  # fmt: skip
        """matrices: by words that name the calls that use them; their sizes become integer fields."""
        self.name, self.numbers, self.arrays, self.declared = name, numbers, arrays, []
        for words, group in matrices.items():
            for field, m in group.items():
                m = m._replace(of=frozenset(words.split()))
                before = m._replace(rows=m.before, before="", alias=field, first=-1)
                self.declared += [(field, m)] + [(field + "_before", before)] * bool(m.before)
        self.matrices = dict(reversed(self.declared))  # its first declaration is a field's type
        sizes = (size for m in self.matrices.values() for size in (m.rows, m.columns, m.slot) if size)
        self.wholes = tuple(dict.fromkeys((*wholes, *sizes)))
        order = [*((n, 1) for n in self.wholes), *((n, 1) for n in numbers), *((n, ARRAY) for n in arrays),
                 *((n, 3) for n in self.matrices)]  # fmt: skip
        self.slots: dict[str, int] = {}
        self.size = 0
        for field, count in order:
            self.slots[field] = self.size
            self.size += count

    def layout(self, sizes: Mapping[str, int], dtype: Any, words: frozenset[str] = frozenset(),
               copies: Mapping[str, int] = {}) -> Layout:  # fmt: skip
        """The table of a kernel whose matrices have at most these sizes; copies: slots of fields with several.

        And which fields are places in the memory of a thread, and the bytes of that memory, which begins with the
        thread's copy of the table; the matrices follow.
        """
        table, W, own, total = np.zeros(self.size, np.int64), lane(dtype), [], up(8 * self.size, ALIGNED)
        for field, m in self.declared:
            if not m.of <= words:
                continue
            item, at = np.dtype(m.dtype or dtype).itemsize, self.slots[field]
            own.append(at)
            if m.alias:
                base = self.slots[m.alias]
                table[at : at + 3] = table[base : base + 3]
                table[at] += m.first * table[base + 1] + sizes.get(m.left, 0) * item
                continue
            if m.columns:
                row = up(sizes[m.columns], W) * item
                size, above = (up(sizes[m.rows], W) + bool(m.before)) * row, bool(m.before) * row
            else:
                row, above = item, up(bool(m.before) * item, ALIGNED)
                size = above + (sizes[m.rows] + 2 * W) * item
            size, count = up(size, ALIGNED), copies.get(field, 1)
            table[at : at + 3] = total + above, row, size if count > 1 else 0
            total += size * count
        for field, size in sizes.items():
            if field in self.slots:
                table[self.slots[field]] = size
        return table, own, total


# in Python, for kernels that are not compiled


class StoredArray:
    """An array of the call, as a NumPy view made from its row of the table."""

    def __init__(self, row: np.ndarray):
        self.row = row

    def rows(self, dtype: Any, batch: int, head: int) -> np.ndarray:
        """(T, D) of one head."""
        at, b, t, h, d, shared, _, batches, tokens, heads, channels = (int(x) for x in self.row)
        kind = np.dtype(dtype)
        shape, strides = (max(batches, 1) if b else 1, tokens, heads, channels), (b, t, h, d)
        view = array_at(at, kind, shape, strides)
        return view[batch if b else 0, :, head // shared]


def array_at(address: int, dtype: np.dtype, shape: tuple[int, ...], strides: tuple[int, ...]) -> np.ndarray:
    """An array at an address; the caller keeps the memory alive."""
    low = sum(min(0, s * (n - 1)) for s, n in zip(strides, shape, strict=True))
    high = sum(max(0, s * (n - 1)) for s, n in zip(strides, shape, strict=True)) + dtype.itemsize
    if 0 in shape:
        return np.empty(shape, dtype)
    interface = {"data": (address + low, False), "shape": (high - low,), "typestr": "|u1", "version": 3}
    memory = np.asarray(type("_Memory", (), {"__array_interface__": interface})())
    return np.ndarray(shape, dtype, memory, -low, strides)


class PythonWorkspace:
    """Fields of a table as NumPy arrays. Its own attributes begin with _, which no field does."""

    def __init__(self, declaration: Workspace, table: np.ndarray, dtype: Any):
        self.__dict__.update(_declaration=declaration, _table=table, _dtype=np.dtype(dtype))

    def __getattr__(self, name: str) -> Any:
        declaration, table = self._declaration, self._table
        at = declaration.slots[name]
        if name in declaration.numbers:
            return self._dtype.type(table[at : at + 1].view(np.float64)[0])
        if name in declaration.arrays:
            return StoredArray(table[at : at + ARRAY])
        if name in declaration.wholes:
            return int(table[at])
        return self._matrix(declaration.matrices[name], at)

    def _matrix(self, m: Matrix, at: int) -> np.ndarray:
        address, row, step = (int(x) for x in self._table[at : at + 3])
        dtype = np.dtype(m.dtype or self._dtype)
        if not address:  # this kind of call does not use it
            return np.empty((0, 0) if m.columns else 0, dtype)
        if m.slot:
            address += step * getattr(self, m.slot)
        shape = tuple(getattr(self, size) for size in (m.rows, m.columns) if size)
        return array_at(address, dtype, shape, (row, dtype.itemsize) if m.columns else (dtype.itemsize,))

    def __setattr__(self, name: str, value: Any) -> None:
        at = self._declaration.slots[name]
        if name in self._declaration.numbers:
            self._table[at : at + 1].view(np.float64)[0] = value
        else:
            self._table[at] = value
