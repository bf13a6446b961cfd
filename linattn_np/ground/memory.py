"""Where the elements of an array lie, and whether two of them share memory."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from .namespace import Array


class Place(NamedTuple):
    """The memory of an array: the first element's address, sizes, and strides in bytes."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int


def place_of(x: Array) -> Place | None:
    """Where x lies; None where its library does not tell (JAX, dask)."""
    shape = tuple(map(int, x.shape))
    if isinstance(x, np.ndarray):
        return Place(x.__array_interface__["data"][0], shape, x.strides, x.itemsize)
    if is_on_device(x):
        return Place(x.data.ptr, shape, tuple(x.strides), x.dtype.itemsize)
    if callable(getattr(x, "stride", None)) and hasattr(x, "data_ptr"):  # torch
        size = x.element_size()
        return Place(x.data_ptr(), shape, tuple(n * size for n in x.stride()), size)
    return None


def is_on_device(x: Array) -> bool:
    """Whether x is an array of CuPy's kind, which tells its strides and a pointer."""
    return not isinstance(x, np.ndarray) and hasattr(x, "strides") and hasattr(getattr(x, "data", None), "ptr")


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
            return _meets(axes, itemsize)
        reach += stride * (n - 1)
    return False


def _meets(axes: list[tuple[int, int]], itemsize: int) -> bool:
    """The same of interleaved axes, by looking at the distance of every element from the first."""
    if any(stride == 0 for stride, _ in axes):
        return True
    starts = np.zeros(1, np.int64)
    for stride, n in axes:
        starts = (starts[:, None] + stride * np.arange(n)).ravel()
    starts.sort()
    return bool((np.diff(starts) < itemsize).any())


def overlap(a: Place | None, b: Place | None) -> bool:
    """Whether an element of a shares memory with one of b; places that nobody tells of do not."""
    if a is None or b is None or 0 in a.shape or 0 in b.shape:
        return False
    (low, high), (begin, end) = _reach(a), _reach(b)
    return low < end and begin < high and bool(np.shares_memory(_shadow(a), _shadow(b)))


def _reach(place: Place) -> tuple[int, int]:
    """The first byte, and the one behind the last."""
    spans = [stride * (n - 1) for stride, n in zip(place.strides, place.shape, strict=True)]
    low = place.address + sum(s for s in spans if s < 0)
    return low, place.address + sum(s for s in spans if s > 0) + place.itemsize


class _Shadow:
    """An array of bytes nobody reads: only where they lie."""

    def __init__(self, place: Place):
        self.__array_interface__ = {"version": 3, "shape": place.shape, "strides": place.strides,
                                    "typestr": f"|V{place.itemsize}", "data": (place.address, True)}  # fmt: skip


def _shadow(place: Place) -> np.ndarray:
    return np.asarray(_Shadow(place))
