"""Views of arrays that compile faster than Numba's slices: each in Python, then its instructions."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from .vectors import I64, Array, Builder, Value, emitted, prefetch, word
from .workspace import AT, BATCH, CHANNEL, HEAD, SHARED, TOKEN, PythonWorkspace, StoredArray, array_at


def same(A: Any, *_: Any) -> Any:
    """The type of the first argument."""
    return A


@emitted(lambda A, i: A[i] if len(A) else np.empty(0, A.dtype), lambda A, i: types.Array(A.dtype, A.ndim - 1, "C"))
def row(b: Builder, A: Array, i: Value) -> Any:
    """A_i: row i, contiguous."""
    return A.at(i), A.shape[1:], A.steps[1:]


@emitted(lambda A, i, first, count: A[i, first : first + count], lambda A, *_: types.Array(A.dtype, 1, "C"))
def row_part(b: Builder, A: Array, i: Value, first: Value, count: Value) -> Any:
    """A[i, first : first + count], all of which exist, contiguous."""
    return A.at(i, first), [count], []


@emitted(lambda A, first, count: A[first : first + count], same)
def rows(b: Builder, A: Array, first: Value, count: Value) -> Any:
    """A[first : first + count], all of which exist."""
    return A.at(first), [count, *A.shape[1:]], A.steps


@emitted(lambda A, first, count: A[:, first : first + count], same)
def columns(b: Builder, A: Array, first: Value, count: Value) -> Any:
    """A[:, first : first + count], all of which exist."""
    return A.at(I64(0), first), [A.shape[0], count], A.steps


@emitted(lambda A: A.T, same)
def transposed(b: Builder, A: Array) -> Any:
    """A^T, as a view."""
    return A.start, A.shape[::-1], A.steps[::-1]


@emitted(lambda A, both: A[::-1, ::-1] if both else A[::-1], same)
def backwards(b: Builder, A: Array, both: Value) -> Any:
    """A with its rows in reverse order, and its columns too if `both`."""
    last = [b.sub(n, I64(1)) for n in A.shape]
    last[1] = b.select(both, last[1], I64(0))
    at = b.add(A.start, b.add(b.mul(last[0], A.steps[0]), b.mul(last[1], A.steps[1])))
    return at, A.shape, [b.neg(A.steps[0]), b.select(both, b.neg(A.steps[1]), A.steps[1])]


@emitted(lambda x: x[None], lambda x: types.Array(x.dtype, 2, "A"))
def as_row(b: Builder, x: Array) -> Any:
    """A vector as a matrix of one row."""
    return x.start, [I64(1), x.shape[0]], [b.mul(x.shape[0], x.steps[0]), x.steps[0]]


@emitted(lambda A, i: A.__array_interface__["data"][0] + i * A.strides[0], types.int64)
def start_of(b: Builder, A: Array, i: Value) -> Any:
    """The address of row i."""
    return A.at(i)


@emitted(lambda like, address, count: array_at(int(address), like.dtype, (int(count),), (like.itemsize,)),
         lambda like, *_: types.Array(like.dtype, 1, "C"))  # fmt: skip
def numbers_at(b: Builder, like: Array, address: Value, count: Value) -> Any:
    """So many numbers side by side at an address, of the dtype of `like`."""
    return address, [count], []


# arrays of the call

STORAGE = (np.float32, np.float64, np.uint16, np.uint16)  # by number: float32, float64, float16, bfloat16
FLOAT32, FLOAT64, FLOAT16, BFLOAT16 = range(4)


def _tokens_of(x: StoredArray, kind: Any, at: tuple[int, int, int], count: int, columns: tuple[int, int]) -> np.ndarray:
    batch, head, t = at
    return x.rows(np.asarray(kind).dtype, batch, head)[t : t + count, columns[0] : columns[0] + columns[1]]


@emitted(_tokens_of, lambda x, kind, *_: types.Array(kind, 2, "A"))
def tokens_of(b: Builder, x: Value, kind: Any, at: Any, count: Value, columns: Any) -> Any:
    """Tokens t .. t + count, columns (first, count), of one head: at = (batch row, head, t); as numbers of a dtype."""
    return _address(b, x, at, columns[0]), [count, columns[1]], [b.load(word(b, x, n)) for n in (TOKEN, CHANNEL)]


def _address_of(x: StoredArray, at: tuple[int, int, int], column: int) -> int:
    start, b, t, h, d, shared = (int(n) for n in x.row[:6])
    return start + at[0] * b + at[2] * t + at[1] // shared * h + column * d


@emitted(_address_of, types.int64)
def address_of(b: Builder, x: Value, at: Any, column: Value) -> Any:
    """Address of column `column` of token t of a head: at = (batch row, head, t)."""
    return _address(b, x, at, column)


def _address(b: Builder, x: Value, at: list[Value], column: Value) -> Value:
    (batch, head, t), entry = at, lambda n: b.load(word(b, x, n))
    address = entry(AT)
    for i, step in ((batch, BATCH), (t, TOKEN), (b.sdiv(head, entry(SHARED)), HEAD), (column, CHANNEL)):
        address = b.add(address, b.mul(i, entry(step)))
    return address


@emitted(lambda x, n: int(x.row[n]), types.int64)
def field_of(b: Builder, x: Value, n: Value) -> Any:
    """Entry n of an array's row of the table: a step, its storage, or how many heads share one."""
    return b.load(word(b, x, n))


@emitted(lambda address: None)
def prefetch_line(b: Builder, address: Value) -> None:
    """Prefetches the line at an address into the second-level cache."""
    prefetch(b, address)


# tables of whole numbers


def _words(address: int, count: int) -> np.ndarray:
    return array_at(int(address), np.dtype(np.int64), (int(count),), (8,))


@emitted(_words, types.int64[::1])
def words(b: Builder, address: Value, count: Value) -> Any:
    """The whole numbers at an address."""
    return address, [count], []


def _point(w: PythonWorkspace, field: int, address: int, step: int) -> None:
    w._table[field : field + 2] = address, step


@emitted(_point)
def point(b: Builder, w: Value, field: Value, address: Value, step: Value) -> None:
    """The matrix at an entry of w's table is at an address, its rows `step` bytes apart."""
    b.store(address, word(b, w, field))
    b.store(step, word(b, w, b.add(field, I64(1))))
