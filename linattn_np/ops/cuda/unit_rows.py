"""Rows of q and k divided by their L2 norm, on CuPy arrays, and the transpose."""

from __future__ import annotations

from math import gcd, prod, sqrt
from typing import Any

from ...runtime.arrays import Array, dtype_name
from ...runtime.cuda import launch
from ...runtime.cuda.elements import BYTES, ELEMENTS, Constants
from .arguments import UNIT_ROWS, address, rows_of

SOURCE = "ops/unit_rows.cu"
THREADS, LANE_NUMBERS = 256, 16  # threads per block; numbers of a row per lane
MOST_ROWS = 2**32
# most partial sums of a parameter's gradient over tokens: the same on every device, so that bits are
TOKEN_BLOCKS = 528
Pair = tuple[Array | None, ...]  # of queries and of keys
NONE = (0,) * 10


def takes(xp: Any, rows: Pair) -> bool:
    """Whether the kernel supports these rows: one array, or two of the same dtype and width."""
    given = [y for y in rows if y is not None]
    if not (xp.__name__.endswith("cupy") and given):
        return False
    alike = all(y.dtype == given[0].dtype and y.shape[-1] == given[0].shape[-1] for y in given)
    small = all(0 < prod(y.shape[:-1]) < MOST_ROWS and 0 < y.shape[-1] <= 32 * LANE_NUMBERS for y in given)
    return alike and small and dtype_name(given[0]) in ELEMENTS and launch.unusable() is None


def unit_rows(xp: Any, rows: Pair, eps: float) -> Pair:
    """x / n of both arrays (..., T, heads, K), n = sqrt(|x|^2 + eps), None for None, in their dtype."""
    return _divide(xp, "unit_rows", rows, (None, None), eps)


def unit_rows_vjp(xp: Any, rows: Pair, grads: Pair, eps: float) -> Pair:
    """(dy - y <y, dy>) / n, y = x / n, of both, in the dtype of x."""
    return _divide(xp, "unit_rows_vjp", rows, grads, eps)


def row_constants(element: str, grad: str, K: int, per: int) -> Constants:
    """Constants of row_pieces.cuh; per: numbers that a lane loads at once; grad: the dtype of dy."""
    lanes = 1
    while lanes < 32 and lanes * per < K:
        lanes *= 2
    return tuple(sorted({
        "LA_DTYPE": ELEMENTS[element], "LA_GRAD": ELEMENTS[grad], "LA_K": K, "LA_PER": per, "LA_LANES": lanes,
        "LA_ALIGN": min(16, per * BYTES[element]),
    }.items()))  # fmt: skip


def _divide(xp: Any, entry: str, arrays: Pair, grads: Pair, eps: float) -> Pair:
    """The result of the entry for each array, contiguous, allocated by `empty`."""
    arrays = tuple(
        None if y is None else y if y.shape[-1] == 1 or y.strides[-1] == y.itemsize else xp.ascontiguousarray(y)
        for y in arrays)  # fmt: skip
    grads = tuple(None if y is None or x is None else xp.ascontiguousarray(y)
                  for x, y in zip(arrays, grads, strict=True))  # fmt: skip
    results = [None if y is None else xp.empty(y.shape, dtype=y.dtype) for y in arrays]
    there = [y for y in (*arrays, *grads) if y is not None]
    first, grad = next(y for y in arrays if y is not None), next((y for y in grads if y is not None), None)
    K, element = first.shape[-1], dtype_name(first)
    per = gcd(16 // first.itemsize, K)
    while per > 1 and any(misaligned(y, per * y.itemsize) for y in there):
        per //= 2
    constants = row_constants(element, element if grad is None else dtype_name(grad), K, per)
    each = THREADS // dict(constants)["LA_LANES"]
    packed: list[Any] = []
    blocks: list[int] = []
    for x, dy, y in zip(arrays, grads, results, strict=True):
        packed += NONE if x is None else _row_array(x, dy, y)
        blocks.append(0 if x is None else -(-prod(x.shape[:-1]) // each))
    struct = UNIT_ROWS.pack(of=packed, first=blocks[0], root=sqrt(eps))
    launch.launch(
        SOURCE, entry, constants, sum(blocks), THREADS, 0, struct, tuple(y for y in (*there, *results) if y is not None)
    )
    return tuple(results)


def misaligned(y: Array, size: int) -> bool:
    """Whether some row of y does not begin at a multiple of min(16, size) bytes."""
    size = min(size, 16)
    return bool(y.data.ptr % size or any(s % size for s, n in zip(y.strides[:-1], y.shape[:-1], strict=True) if n > 1))


def _row_array(x: Array, dy: Array | None, y: Array) -> tuple[int, ...]:
    """The UNIT_ROWS_ARRAY struct."""
    return *rows_of(x), address(dy), y.data.ptr, prod(x.shape[:-1]), *x.shape[-3:-1]
