"""Rows of CuPy arrays as the kernels of cuda_src/nn read them: strides, kinds, lanes of a row."""

from __future__ import annotations

from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ...runtime.arrays import Array, name_of
from ...runtime.cuda import launch
from .formulas import KINDS, NO_KIND, compiled

MOST_ROWS = 1 << 31
WARP, BLOCK, LARGE = 32, 256, 1024  # lanes of a row
HELD = 4  # pieces of a lane in registers
Strides = tuple[int, int, int]
NONE: Strides = (0, 0, 0)


class Grid(NamedTuple):
    """How rows are cut: numbers that a lane moves together, lanes of a row, rows of a block."""

    per: int
    lanes: int

    @property
    def threads(self) -> int:
        return self.lanes if self.lanes > WARP else BLOCK

    @property
    def beside(self) -> int:
        return self.threads // self.lanes


def kind_of(x: Array | None) -> int:
    """LA_*: of a number in memory."""
    return NO_KIND if x is None else KINDS[name_of(x.dtype)]


def is_narrow(*arrays: Array | None) -> bool:
    """Whether results are stored in 16 bits, so that exponentials may be approximate."""
    return all(x is None or x.itemsize == 2 for x in arrays)


def working_dtype(*arrays: Array | None) -> Any:
    """float64 if an array is, else float32."""
    return np.dtype(np.float64 if any(x is not None and x.dtype == np.float64 for x in arrays) else np.float32)


def is_aligned(per: int, *arrays: Array | None) -> bool:
    """Whether `per` neighbours of every array can be moved together, up to 16 bytes at a time."""
    return not any(x is not None and _misaligned(x, per * x.itemsize) for x in arrays)


def tokens_of(x: Any) -> tuple[Any, Strides]:
    """(an array (..., channels), copied unless its rows have one stride, its STRIDED struct)."""
    if x is None:
        return None, NONE
    axes = [(n, t) for n, t in zip(x.shape[:-1], x.strides[:-1], strict=True) if n > 1]
    apart = x.shape[-1] > 1 and x.strides[-1] != x.itemsize
    if apart or any(t != n * u for (_, t), (n, u) in pairwise(axes)):
        x = dense(x)
        axes = [(x.size, x.shape[-1] * x.itemsize)]
    return x, (x.data.ptr, axes[-1][1] if axes else 0, 0)


def grid_of(D: int, first: Array, *arrays: Array | None) -> Grid:
    """The grid of rows of D numbers of these arrays."""
    per = _per(D, first, *arrays)
    pieces = -(-D // per)
    lanes = BLOCK if pieces <= HELD * BLOCK else LARGE
    if pieces <= HELD * WARP:
        lanes = 1
        while lanes < min(pieces, WARP):
            lanes *= 2
    return Grid(per, lanes)


def spread_of(D: int, first: Array, *arrays: Array | None) -> Grid:
    """The grid with one or two pieces of a row for each lane, up to 2 BLOCK lanes."""
    per, lanes = _per(D, first, *arrays), 1
    while lanes < 2 * BLOCK and lanes * per * (1 if lanes < WARP else 2) < D:
        lanes *= 2
    return Grid(per, lanes)


def _per(D: int, first: Array, *arrays: Array | None) -> int:
    """Numbers that a lane moves together."""
    per = 16 // first.itemsize
    while per > 1 and (D % per or not is_aligned(per, first, *arrays)):
        per //= 2
    return per


def _misaligned(x: Array, size: int) -> bool:
    size = min(size, 16)
    return bool(x.data.ptr % size or any(s % size for s, n in zip(x.strides[:-1], x.shape[:-1], strict=True) if n > 1))


def strided(D: int, *arrays: Array | None) -> tuple[int, list[Array | None]]:
    """(inner rows of each outer one, arrays of rows of D numbers that `strides_of` can describe, copied if need be)."""
    given = [x for x in arrays if x is not None]
    if all(x.flags.c_contiguous for x in given):
        return 1, list(arrays)
    first = given[0]
    inner = (first.shape[-2] if first.ndim > 1 else 1) * (first.shape[-1] // D)
    return inner, [x if x is None or _lies(x, D) else dense(x) for x in arrays]


def dense(x: Any) -> Any:
    """x in C order, a copy where it is not; None for None."""
    return x if x is None or x.flags.c_contiguous else copied(x)


def copied(x: Array) -> Array:
    """A copy of x in C order, by a kernel."""
    return compiled("copy", (x,), (tuple(x.shape), x.dtype), working_dtype(x))


def _lies(x: Array, D: int) -> bool:
    """Whether outer rows have one stride, and the inner rows of each another one."""
    if x.flags.c_contiguous or (x.shape[-1] > 1 and x.strides[-1] != x.itemsize) or x.ndim < 2:
        return bool(x.flags.c_contiguous)
    if x.shape[-1] != D and x.shape[-2] > 1 and x.strides[-2] != x.shape[-1] * x.itemsize:
        return False
    axes = [(n, s) for n, s in zip(x.shape[:-2], x.strides[:-2], strict=True) if n > 1]
    return all(s == n * t for (_, s), (n, t) in pairwise(axes))


def strides_of(x: Array | None, D: int, inner: int) -> Strides:
    """The STRIDED struct of rows of D numbers."""
    if x is None:
        return NONE
    size = D * x.itemsize
    if x.flags.c_contiguous or x.ndim < 2:
        return x.data.ptr, inner * size, size
    outer = next((s for n, s in zip(x.shape[-3::-1], x.strides[-3::-1], strict=True) if n > 1), 0)
    return x.data.ptr, outer, size if x.shape[-1] != D else x.strides[-2]


def rows_of(x: Array, D: int) -> int:
    """How many rows of D numbers an array has."""
    return prod(x.shape) // D


def launched(file: str, entry: str, constants: dict[str, int], blocks: int, threads: int, packed: bytes, *arrays: Any):
    """Launch an entry with its constants in order."""
    given = tuple(x for x in arrays if x is not None)
    launch.launch(file, entry, tuple(sorted(constants.items())), blocks, threads, 0, packed, given)
