"""Layouts of arrays for the copy engine of compute capability 90: 128 bytes, encoded by the driver."""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import Any

from . import launch

BYTES = 128
BOX, ROW = 64, 128  # tokens of a box, and bytes of a row of it: 64 columns of 16 bits, 32 of 32
BFLOAT16, FLOAT32 = 9, 7  # the driver's numbers of elements
SWIZZLE_128, L2_128 = 3, 2  # rows of 128 bytes permuted by their number; 128 bytes fetched at once


@functools.cache
def _driver() -> Any:
    """The driver's encoder.   Raises OSError where there is no driver."""
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1").cuTensorMapEncodeTiled


def takes(x: Any) -> bool:
    """Whether an array (B, T, heads, width) can be copied so: contiguous rows, all else in steps of 16 bytes."""
    strides = [s for s, n in zip(x.strides[:-1], x.shape[:-1], strict=True) if n > 1]
    rows = x.shape[-1] == 1 or x.strides[-1] == x.itemsize
    return rows and x.data.ptr % 16 == 0 and all(s > 0 and s % 16 == 0 for s in strides)


def tensor_map(x: Any, steps: int = 1) -> bytes:
    """The map of an array (B, T, heads, width) that `takes` covers, in boxes of 128 bytes of 64 tokens.

    With `steps`, a divisor of 64, boxes are of 64 steps of tokens that have so many: an axis of length 1 stands between
    tokens and heads, and a box that begins `steps` - 1 before it has zeros for all but the last step of each token.
    Raises RuntimeError with the driver's number if it refuses.
    """
    launch.bind()
    return _encode(x.data.ptr, x.shape, x.strides, x.itemsize, steps)


@functools.cache
def moves() -> bool:
    """Whether a map is for another array of the same layout once its first word is that one's pointer."""
    launch.bind()
    there, elsewhere = 1 << 40, (1 << 40) + (1 << 33) + 4096
    one, other = (_encode(at, (2, 65, 3, 72), (65 * 432, 432, 144, 2), 2) for at in (there, elsewhere))
    words = [int.from_bytes(x[:8], "little") for x in (one, other)]
    return words == [there, elsewhere] and one[8:] == other[8:]


def _encode(pointer: int, shape: tuple[int, ...], strides: tuple[int, ...], size: int, steps: int = 1) -> bytes:
    B, T, H, D = shape
    row = -(-D * size // 16) * 16
    sizes, apart, box = [D, H, T, B], [strides[2], strides[1], strides[0]], [ROW // size, 1, BOX, 1]
    if steps > 1:
        sizes, apart = [D, H, 1, T, B], [strides[2], row, strides[1], strides[0]]
        box = [ROW // size, 1, steps, BOX // steps, 1]
    apart, rank = [s if n > 1 else row for s, n in zip(apart, sizes[1:], strict=True)], len(sizes)
    buffer = ctypes.create_string_buffer(BYTES + 64)
    at = (ctypes.addressof(buffer) + 63) & ~63
    status = _driver()(
        ctypes.c_void_p(at), BFLOAT16 if size == 2 else FLOAT32, rank, ctypes.c_void_p(pointer),
        (ctypes.c_uint64 * rank)(*sizes), (ctypes.c_uint64 * (rank - 1))(*apart), (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        0, SWIZZLE_128, L2_128, 0,
    )  # fmt: skip
    if status:
        raise RuntimeError(f"the driver made no tensor map of shape {shape}, strides {strides}: error {status}")
    return ctypes.string_at(at, BYTES)
