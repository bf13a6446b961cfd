"""Numbers of any storage dtype and stride, widened exactly to the dtype of the computation, and rounded back."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types

from ...runtime.pieces.memory import STREAMED
from ...runtime.pieces.piece import Column, Kind, Matrix, Number, Stored, Vector, Whole, piece
from ...runtime.pieces.registers import registers, store_past_caches
from ...runtime.pieces.tiles import copy_row
from ...runtime.pieces.vectors import BYTES
from ...runtime.pieces.views import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, as_row, field_of, row, tokens_of, transposed
from ...runtime.pieces.views import columns as columns_of
from ...runtime.pieces.workspace import AT, BATCHES, CHANNEL, HEAD, SHARED, STORAGE, TOKEN, TOKENS
from .numbers import OPTIONS, number
from .rows import clear

Place = Kind(lambda f: types.UniTuple(types.int64, 3), False)  # (batch row, head, first token)
Columns = Kind(lambda f: types.UniTuple(types.int64, 2), False)  # (first, count)
F4, F8, U2 = np.float32(0), np.float64(0), np.uint16(0)
U = np.uint32
_, load_vector = registers(1)


@njit(**OPTIONS)
def from_bfloat16(bits: Any) -> Any:
    """The number of 16 bits; subnormals and NaN too."""
    return U(U(bits) << U(16)).view(np.float32)


@njit(**OPTIONS)
def from_float16(bits: Any) -> Any:
    """The number of 16 bits: its exponent moved by a multiplication, which is exact for subnormals too."""
    h = U(bits)
    magnitude = U(U(h & U(0x7FFF)) << U(13))
    finite = np.float32(magnitude.view(np.float32) * U((127 + 112) << 23).view(np.float32)).view(np.uint32)
    special = U(magnitude | U(0x70000000))
    y = special if U(h & U(0x7C00)) == U(0x7C00) else finite
    return U(y | U(U(h & U(0x8000)) << U(16))).view(np.float32)


@piece
def load(x: Stored, place: Place, columns: Columns, out: Matrix):
    """out = tokens of one head, from `place` on, columns (first, count); 0 to the right of them."""
    m, unit = len(out), out.itemsize
    if field_of(x, STORAGE) == (FLOAT32 if unit == 4 else FLOAT64) and field_of(x, CHANNEL) == unit:
        A = tokens_of(x, out[0, 0], place, m, columns)
        for i in range(m):
            copy_row(row(A, i), row(out, i), columns[1])
    else:
        load_converted(x, place, columns, out)


@piece(of="converted")
def load_converted(x: Stored, place: Place, columns: Columns, out: Matrix):
    """`load` of another dtype, or of numbers that lie apart; those side by side are converted in vectors."""
    m, count, storage = len(out), columns[1], field_of(x, STORAGE)
    A4, A8, A2 = (tokens_of(x, F4, place, m, columns), tokens_of(x, F8, place, m, columns),
                  tokens_of(x, U2, place, m, columns))  # fmt: skip
    clear(columns_of(out, count, out.shape[1] - count))
    for i in range(m):
        bits, to = row(A2, i), row(out, i)
        if storage in (FLOAT16, BFLOAT16) and field_of(x, CHANNEL) == 2:
            for j in range(count):
                to[j] = from_float16(bits[j]) if storage == FLOAT16 else from_bfloat16(bits[j])
        elif storage == FLOAT32 and field_of(x, CHANNEL) == 4:
            numbers = row(A4, i)
            for j in range(count):
                to[j] = numbers[j]
        else:
            for j in range(count):
                if storage == FLOAT32:
                    out[i, j] = A4[i, j]
                elif storage == FLOAT64:
                    out[i, j] = A8[i, j]
                else:
                    out[i, j] = from_float16(A2[i, j]) if storage == FLOAT16 else from_bfloat16(A2[i, j])


@piece
def load_column(x: Stored, place: Place, out: Column):
    """out = the first number of each token."""
    load(x, place, (0, 1), transposed(as_row(out)))


@piece
def save(A: Matrix, x: Stored, place: Place, columns: Columns, factors: Vector = None):
    """Rows factors_i A_i to tokens of an array in the dtype of the computation, from `place` on.

    Where heads share a head of the array, they are added to the sums of the heads before.
    """
    out = tokens_of(x, A[0, 0], place, len(A), columns)
    more = place[1] % field_of(x, SHARED) != 0
    for i in range(len(A)):
        a, to = row(A, i), row(out, i)
        f = factors[i] if len(factors) else number(A, 1)
        if more:
            for j in range(len(to)):
                to[j] += f * a[j]
        else:
            for j in range(len(to)):
                to[j] = f * a[j]


@piece
def stream(A: Matrix, x: Stored, place: Place, columns: Columns, factors: Vector = None):
    """`save` of rows that are not read soon: past the caches, into an array larger than they are."""
    out, step, places = tokens_of(x, A[0, 0], place, len(A), columns), field_of(x, TOKEN), (columns[0] | columns[1])
    is_whole = (field_of(x, AT) | field_of(x, HEAD) | step | places * A.itemsize) % BYTES == 0  # vectors of memory
    if is_whole and field_of(x, BATCHES) * field_of(x, TOKENS) * step >= STREAMED and field_of(x, SHARED) == 1:
        for i in range(len(A)):
            a, to, f = row(A, i), row(out, i), factors[i] if len(factors) else number(A, 1)
            for j in range(0, len(to), BYTES // A.itemsize):
                store_past_caches(f * load_vector(a, j), to, j)
    else:
        save(A, x, place, columns, factors)


@piece
def save_column(a: Vector, x: Stored, place: Place):
    """Numbers to the first column of tokens, as `save`."""
    save(transposed(as_row(a)), x, place, (0, 1))


@piece
def clear_sums(x: Stored, place: Place, count: Whole, columns: Columns, unit: Number):
    """Tokens of an array are 0 before the first of the heads that share a head of it; unit: of the dtype."""
    if place[1] % field_of(x, SHARED) == 0:
        clear(tokens_of(x, unit, place, count, columns))


# rounding to 16 bits, to nearest even; float64 goes through float32

HALF_ROUND, HALF_NORMAL, INFINITE = U(0x47800000), U(0x38800000), U(0x7F800000)  # of 2^16, 2^-14, inf


@njit(**OPTIONS)
def to_bfloat16(bits: Any) -> Any:
    """Of the bits of a float32: half of the last place is added, less one bit where the rest is even."""
    high = U(bits >> U(16))
    rounded = U(U(bits + U(U(high & U(1)) + U(0x7FFF))) >> U(16))
    quiet = U(U(high & U(0x8000)) | U(0x7FC0))
    return np.uint16(quiet if U(bits & U(0x7FFFFFFF)) > INFINITE else rounded)


@njit(**OPTIONS)
def to_float16(bits: Any) -> Any:
    """The same with the exponent moved; a subnormal is rounded by the sum with 0.5."""
    magnitude = U(bits & U(0x7FFFFFFF))
    odd = U(U(magnitude >> U(13)) & U(1))
    normal = U(U(U(magnitude + U(0xC8000FFF)) + odd) >> U(13))
    added = np.float32(magnitude.view(np.float32) + np.float32(0.5))
    subnormal = U(added.view(np.uint32) - U(0x3F000000))
    payload = U(U(U(bits & U(0x7FFFFF)) >> U(13)) + U(0x7C00))  # of a NaN, which must not become infinite
    payload = U(0x7C01) if payload == U(0x7C00) else payload
    special = payload if magnitude > INFINITE else U(0x7C00)
    finite = subnormal if magnitude < HALF_NORMAL else normal
    rounded = special if magnitude >= HALF_ROUND else finite
    return np.uint16(U(rounded | U(U(bits >> U(16)) & U(0x8000))))


@njit(**OPTIONS)
def bits_of(x: Any) -> Any:
    """The bits of x as a float32."""
    return np.float32(x).view(np.uint32)


@njit(**OPTIONS)
def odd_bits_of(x: Any) -> Any:
    """The same rounded to odd: towards 0, the last bit set if something is left. A second rounding is then exact."""
    y = np.float32(x)
    bits = y.view(np.uint32)
    below = U(bits - U(1)) if abs(np.float64(y)) > abs(np.float64(x)) else bits
    return U(below | U(1)) if np.float64(y) != np.float64(x) and x == x else bits


@piece(of="rounded")
def store_rounded(A: Matrix, x: Stored, place: Place, columns: Columns):
    """`store` to an array of another dtype, or of numbers apart."""
    storage, apart = field_of(x, STORAGE), field_of(x, CHANNEL)
    A4, A8, A2 = (tokens_of(x, F4, place, len(A), columns), tokens_of(x, F8, place, len(A), columns),
                  tokens_of(x, U2, place, len(A), columns))  # fmt: skip
    for i in range(len(A)):
        a, bits, numbers = row(A, i), row(A2, i), row(A4, i)
        if storage == BFLOAT16 and apart == 2:
            for j in range(len(a)):
                bits[j] = to_bfloat16(bits_of(a[j]))
        elif storage == FLOAT16 and apart == 2:
            for j in range(len(a)):
                bits[j] = to_float16(odd_bits_of(a[j]))
        elif storage == FLOAT32 and apart == 4:
            for j in range(len(a)):
                numbers[j] = a[j]
        else:
            for j in range(len(a)):
                if storage == FLOAT32:
                    A4[i, j] = a[j]
                elif storage == FLOAT64:
                    A8[i, j] = a[j]
                else:
                    A2[i, j] = to_float16(odd_bits_of(a[j])) if storage == FLOAT16 else to_bfloat16(bits_of(a[j]))


@piece
def store(A: Matrix, x: Stored, place: Place, columns: Columns):
    """Rows of A to tokens of an array of any storage dtype and stride, from `place` on, columns (first, count)."""
    if field_of(x, STORAGE) == (FLOAT32 if A.itemsize == 4 else FLOAT64) and field_of(x, CHANNEL) == A.itemsize:
        out = tokens_of(x, A[0, 0], place, len(A), columns)
        for i in range(len(A)):
            copy_row(row(A, i), row(out, i), columns[1])
    else:
        store_rounded(A, x, place, columns)
