"""Memory addresses of arrays, and tests for overlap."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from .arrays import Array
from .pieces.memory import first_byte


class Place(NamedTuple):
    """The memory of an array: the first element's address, sizes, and strides in bytes."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int


def address(x: np.ndarray) -> int:
    """Address of the first element."""
    return x.__array_interface__["data"][0]


def place_of(x: Array) -> Place | None:
    """The memory of x; None if its library does not expose addresses (JAX, dask)."""
    shape = tuple(map(int, x.shape))
    if isinstance(x, np.ndarray):
        return Place(address(x), shape, x.strides, x.itemsize)
    if is_on_device(x):
        return Place(x.data.ptr, shape, tuple(x.strides), x.dtype.itemsize)
    if callable(getattr(x, "stride", None)) and hasattr(x, "data_ptr"):  # torch
        size = x.element_size()
        return Place(x.data_ptr(), shape, tuple(n * size for n in x.stride()), size)
    return None


def is_next_column(S: np.ndarray, z: np.ndarray) -> bool:
    """Whether z is the column behind those of S, of one array."""
    if S.strides[:-1] != z.strides or S.dtype != z.dtype or S.strides[-1] != S.itemsize:
        return False
    return first_byte(z) - first_byte(S) == S.shape[-1] * S.itemsize


def is_on_device(x: Array) -> bool:
    """Whether x has strides and a device pointer, as CuPy arrays do."""
    return type(x) is not np.ndarray and hasattr(x, "strides") and hasattr(getattr(x, "data", None), "ptr")


def overlaps_itself(place: Place) -> bool:
    """Whether two elements share memory."""
    return _overlaps_itself(*place[1:])


@functools.lru_cache(maxsize=256)
def _overlaps_itself(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    if 0 in shape:
        return False
    axes = [(abs(stride), n) for stride, n in zip(strides, shape, strict=True) if n > 1]
    reach = itemsize  # bytes from the first element of the axes so far to the end of the last
    for stride, n in sorted(axes):
        if stride < reach:
            return _interleaved_overlap(axes, itemsize)
        reach += stride * (n - 1)
    return False


def _interleaved_overlap(axes: list[tuple[int, int]], itemsize: int) -> bool:
    """Whether elements overlap for interleaved axes, from the offset of every element."""
    if any(stride == 0 for stride, _ in axes):
        return True
    starts = np.zeros(1, np.int64)
    for stride, n in axes:
        starts = (starts[:, None] + stride * np.arange(n)).ravel()
    starts.sort()
    return bool((np.diff(starts) < itemsize).any())


def overlap(a: Place | None, b: Place | None) -> bool:
    """Whether a and b share memory; False if one is unknown."""
    if a is None or b is None or 0 in a.shape or 0 in b.shape:
        return False
    (low, high), (begin, end) = _reach(a), _reach(b)
    return low < end and begin < high and bool(np.shares_memory(_shadow(a), _shadow(b)))


def _reach(place: Place) -> tuple[int, int]:
    """Address of the first byte, and one past the last."""
    spans = [stride * (n - 1) for stride, n in zip(place.strides, place.shape, strict=True)]
    low = place.address + sum(s for s in spans if s < 0)
    return low, place.address + sum(s for s in spans if s > 0) + place.itemsize


class _Shadow:
    """An array with the given addresses; its content is not read."""

    def __init__(self, place: Place):
        self.__array_interface__ = {"version": 3, "shape": place.shape, "strides": place.strides,
                                    "typestr": f"|V{place.itemsize}", "data": (place.address, True)}  # fmt: skip


def _shadow(place: Place) -> np.ndarray:
    return np.asarray(_Shadow(place))


@functools.lru_cache(maxsize=256)
def extent(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> tuple[int, int]:
    """The same from the first element on."""
    return _reach(Place(0, shape, strides, itemsize))
