"""Views of arrays, without what Numba's slices cost to compile; what each does stands above it in Python."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from .piece import StoredType
from .vectors import I64, Array, emitted, known, make_array
from .workspace import AT, BATCH, CHANNEL, HEAD, SHARED, TOKEN, PythonWorkspace, StoredArray, array_at


def _row(A: np.ndarray, i: int) -> np.ndarray:
    return A[i]


@emitted(_row)
def row(typing: Any, A: Any, i: Any) -> Any:
    """A_i: row i, whose columns lie side by side."""
    kind = types.Array(A.dtype, A.ndim - 1, "C")

    def write(context: Any, b: ir.IRBuilder, signature: Any, values: Any) -> Any:
        array = Array(context, b, A, values[0])
        return make_array(context, b, kind, array.at(values[1]), array.shape[1:], array.steps[1:])

    return kind(A, types.int64), write


def _rows(A: np.ndarray, first: int, count: int) -> np.ndarray:
    return A[first : first + count]


@emitted(_rows)
def rows(typing: Any, A: Any, first: Any, count: Any) -> Any:
    """A[first : first + count], all of which exist."""

    def write(context: Any, b: ir.IRBuilder, signature: Any, values: Any) -> Any:
        array = Array(context, b, A, values[0])
        shape = [values[2], *array.shape[1:]]
        return make_array(context, b, signature.return_type, array.at(values[1]), shape, array.steps)

    return A(A, types.int64, types.int64), write


def _columns(A: np.ndarray, first: int, count: int) -> np.ndarray:
    return A[:, first : first + count]


@emitted(_columns)
def columns(typing: Any, A: Any, first: Any, count: Any) -> Any:
    """A[:, first : first + count], all of which exist."""

    def write(context: Any, b: ir.IRBuilder, signature: Any, values: Any) -> Any:
        array = Array(context, b, A, values[0])
        at = array.at(I64(0), values[1])
        return make_array(context, b, signature.return_type, at, [array.shape[0], values[2]], array.steps)

    return A(A, types.int64, types.int64), write


def _transposed(A: np.ndarray) -> np.ndarray:
    return A.T


@emitted(_transposed)
def transposed(typing: Any, A: Any) -> Any:
    """A^T, as a view."""

    def write(context: Any, b: ir.IRBuilder, signature: Any, values: Any) -> Any:
        array = Array(context, b, A, values[0])
        return make_array(context, b, signature.return_type, array.start, array.shape[::-1], array.steps[::-1])

    return A(A), write


def _backwards(A: np.ndarray, both: bool) -> np.ndarray:
    return A[::-1, ::-1] if both else A[::-1]


@emitted(_backwards)
def backwards(typing: Any, A: Any, both: Any) -> Any:
    """A with its rows in reverse order, and its columns too if `both`."""

    def write(context: Any, b: ir.IRBuilder, signature: Any, values: Any) -> Any:
        array = Array(context, b, A, values[0])
        last = [b.sub(n, I64(1)) for n in array.shape]
        last[1] = b.select(values[1], last[1], I64(0))
        at = b.add(array.start, b.add(b.mul(last[0], array.steps[0]), b.mul(last[1], array.steps[1])))
        steps = [b.neg(array.steps[0]), b.select(values[1], b.neg(array.steps[1]), array.steps[1])]
        return make_array(context, b, signature.return_type, at, array.shape, steps)

    return A(A, types.boolean), write


def _as_row(x: np.ndarray) -> np.ndarray:
    return x[None]


@emitted(_as_row)
def as_row(typing: Any, x: Any) -> Any:
    """A vector as a matrix of one row."""
    kind = types.Array(x.dtype, 2, "A")

    def write(context: Any, b: ir.IRBuilder, signature: Any, values: Any) -> Any:
        array = Array(context, b, x, values[0])
        steps = [b.mul(array.shape[0], array.steps[0]), array.steps[0]]
        return make_array(context, b, kind, array.start, [I64(1), array.shape[0]], steps)

    return kind(x), write


# arrays of the call

STORAGE = (np.float32, np.float64, np.uint16, np.uint16)  # by number: float32, float64, float16, bfloat16
FLOAT32, FLOAT64, FLOAT16, BFLOAT16 = range(4)


def _tokens_of(x: StoredArray, kind: Any, at: tuple[int, int, int], count: int, columns: tuple[int, int]) -> np.ndarray:
    batch, head, t = at
    return x.rows(np.asarray(kind).dtype, batch, head)[t : t + count, columns[0] : columns[0] + columns[1]]


@emitted(_tokens_of)
def tokens_of(typing: Any, x: Any, kind: Any, at: Any, count: Any, columns: Any) -> Any:
    """Tokens t .. t + count, columns (first, count), of one head: at = (batch row, head, t); as numbers of a dtype."""
    array = types.Array(kind, 2, "A")

    def write(context: Any, b: ir.IRBuilder, signature: Any, values: Any) -> Any:
        table, _, at, count, columns = values
        entry = lambda n: b.load(b.inttoptr(b.add(table, I64(8 * n)), I64.as_pointer()))  # noqa: E731
        address = _address(b, table, at, b.extract_value(columns, 0))
        shape = [count, b.extract_value(columns, 1)]
        return make_array(context, b, array, address, shape, [entry(TOKEN), entry(CHANNEL)])

    assert isinstance(x, StoredType)
    whole = types.UniTuple(types.int64, 3), types.int64, types.UniTuple(types.int64, 2)
    return array(x, kind, *whole), write


def _address_of(x: StoredArray, at: tuple[int, int, int], column: int) -> int:
    start, b, t, h, d, shared = (int(n) for n in x.row[:6])
    return start + at[0] * b + at[2] * t + at[1] // shared * h + column * d


@emitted(_address_of)
def address_of(typing: Any, x: Any, at: Any, column: Any) -> Any:
    """Where column `column` of token t of a head lies: at = (batch row, head, t)."""

    def write(context: Any, b: ir.IRBuilder, signature: Any, values: Any) -> Any:
        return _address(b, *values)

    return types.int64(x, types.UniTuple(types.int64, 3), types.int64), write


def _address(b: ir.IRBuilder, table: ir.Value, at: ir.Value, column: ir.Value) -> ir.Value:
    entry = lambda n: b.load(b.inttoptr(b.add(table, I64(8 * n)), I64.as_pointer()))  # noqa: E731
    batch, head, t = (b.extract_value(at, n) for n in range(3))
    address = entry(AT)
    for i, step in ((batch, BATCH), (t, TOKEN), (b.sdiv(head, entry(SHARED)), HEAD), (column, CHANNEL)):
        address = b.add(address, b.mul(i, entry(step)))
    return address


def _field_of(x: StoredArray, n: int) -> int:
    return int(x.row[n])


@emitted(_field_of)
def field_of(typing: Any, x: Any, n: Any) -> Any:
    """Entry n of an array's row: a step, its storage, the heads that share a head."""

    def write(context: Any, b: ir.IRBuilder, signature: Any, values: Any) -> Any:
        return b.load(b.inttoptr(b.add(values[0], b.mul(values[1], I64(8))), I64.as_pointer()))

    return types.int64(x, types.int64), write


def _prefetch_line(address: int) -> None:
    pass


@emitted(_prefetch_line)
def prefetch_line(typing: Any, address: Any) -> Any:
    """Brings the line at an address into the second cache."""

    def write(context: Any, b: ir.IRBuilder, signature: Any, values: Any) -> Any:
        kinds = [ir.PointerType(), ir.IntType(32), ir.IntType(32), ir.IntType(32)]
        flags = [k(n) for k, n in zip(kinds[1:], (0, 2, 1), strict=True)]
        b.call(known(b, "llvm.prefetch.p0", ir.VoidType(), kinds), [b.inttoptr(values[0], kinds[0]), *flags])
        return context.get_dummy_value()

    return types.void(types.int64), write


def _rows_by(A: np.ndarray, first: int, step: int, count: int) -> np.ndarray:
    return A[first : first + (count - 1) * step + 1 : step]


@emitted(_rows_by)
def rows_by(typing: Any, A: Any, first: Any, step: Any, count: Any) -> Any:
    """Rows first, first + step, ..., `count` of them, all of which exist."""

    def write(context: Any, b: ir.IRBuilder, signature: Any, values: Any) -> Any:
        array, (first, step, count) = Array(context, b, A, values[0]), values[1:]
        steps = [b.mul(array.steps[0], step), array.steps[1]]
        return make_array(context, b, signature.return_type, array.at(first), [count, array.shape[1]], steps)

    return A(A, types.int64, types.int64, types.int64), write


def _repeated(x: np.ndarray, step: int) -> np.ndarray:
    return np.lib.stride_tricks.as_strided(x, (len(x),), (step * x.itemsize,))


@emitted(_repeated)
def repeated(typing: Any, x: Any, step: Any) -> Any:
    """x itself (step 1), or its first number as often as x has numbers (step 0)."""
    kind = types.Array(x.dtype, 1, "A")

    def write(context: Any, b: ir.IRBuilder, signature: Any, values: Any) -> Any:
        array = Array(context, b, x, values[0])
        return make_array(context, b, kind, array.start, array.shape, [b.mul(values[1], I64(array.size))])

    return kind(x, types.int64), write


def _start_of(A: np.ndarray, i: int) -> int:
    return A.__array_interface__["data"][0] + i * A.strides[0]


@emitted(_start_of)
def start_of(typing: Any, A: Any, i: Any) -> Any:
    """The address of row i."""

    def write(context: Any, b: ir.IRBuilder, signature: Any, values: Any) -> Any:
        return Array(context, b, A, values[0]).at(values[1])

    return types.int64(A, types.int64), write


def _words(address: int, count: int) -> np.ndarray:
    return array_at(address, np.dtype(np.int64), (count,), (8,))


@emitted(_words)
def words(typing: Any, address: Any, count: Any) -> Any:
    """The whole numbers at an address."""
    kind = types.int64[::1]

    def write(context: Any, b: ir.IRBuilder, signature: Any, values: Any) -> Any:
        return make_array(context, b, kind, values[0], [values[1]], [I64(8)])

    return kind(types.int64, types.int64), write


def _point(w: PythonWorkspace, field: int, address: int, step: int) -> None:
    w.table[field : field + 2] = address, step


@emitted(_point)
def point(typing: Any, w: Any, field: Any, address: Any, step: Any) -> Any:
    """The matrix at an entry of w's table is at an address, its rows `step` bytes apart."""

    def write(context: Any, b: ir.IRBuilder, signature: Any, values: Any) -> Any:
        at = b.add(values[0], b.mul(values[1], I64(8)))
        b.store(values[2], b.inttoptr(at, I64.as_pointer()))
        b.store(values[3], b.inttoptr(b.add(at, I64(8)), I64.as_pointer()))
        return context.get_dummy_value()

    return types.void(w, *[types.int64] * 3), write


def _table_of(w: PythonWorkspace) -> int:
    return w.table.ctypes.data


@emitted(_table_of)
def table_of(typing: Any, w: Any) -> Any:
    """The address of a workspace's table."""
    return types.int64(w), lambda context, b, signature, values: values[0]


def _workspace_at(w: PythonWorkspace, address: int) -> PythonWorkspace:
    return PythonWorkspace(w.declaration, _words(address, w.declaration.size), w.dtype)


@emitted(_workspace_at)
def workspace_at(typing: Any, w: Any, address: Any) -> Any:
    """The workspace of w's fields whose table is at an address."""
    return w(w, types.int64), lambda context, b, signature, values: values[1]
