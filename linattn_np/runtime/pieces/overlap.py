"""Whether arrays that a recorded call overwrites overlap others: runtime/memory.py:shares_memory, in compiled code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..memory import extent, shares_memory
from .memory import address, handles, place
from .piece import Whole, entry, load_pieces, piece
from .views import words


@piece
def meet(told: Whole, extents: Whole, n: Whole, m: Whole) -> Whole:
    """Whether two arrays reach into each other.

    told: handles; extents: of each array the first byte and the one after the last, from its first element on.
    """
    own, other = words(extents, 2 * n + 2), words(extents, 2 * m + 2)
    at, there = words(words(told, n + 1)[n], 1)[0], words(words(told, m + 1)[m], 1)[0]
    return 1 if there + other[2 * m] < at + own[2 * n + 1] and at + own[2 * n] < there + other[2 * m + 1] else 0


@piece
def spans_meet(told: Whole, extents: Whole, parts: Whole, count: Whole):
    """Write 1 behind the handles if one of the first `parts` arrays reaches into another one."""
    found = 0
    for n in range(parts):
        for m in range(n + 1, count):
            found |= meet(told, extents, n, m)
    words(told, count + 1)[count] = found


class Overlap:
    """shares_memory(parts, arrays) of arrays with the shapes and strides of these."""

    def __init__(self, parts: Sequence[Any], arrays: Sequence[np.ndarray]):
        each = [extent(y.shape, y.strides, y.itemsize) for y in (*parts, *arrays)]
        self._extents, self._parts, self._count = np.array(each, np.int64), len(parts), len(each)
        load_pieces((spans_meet,), "float32")
        self._meet: Any = entry(spans_meet, "float32")
        self._at = address(self._extents)

    def __call__(self, parts: Sequence[Any], arrays: list[np.ndarray]) -> bool:
        return self.meets(parts, arrays) and shares_memory(parts, arrays)

    def meets(self, parts: Sequence[Any], arrays: list[np.ndarray]) -> bool:
        """Whether the memory from the first byte to the last of a part overlaps another one's, also without sharing."""
        row = handles([*parts, *arrays])
        self._meet(place(row), self._at, self._parts, self._count)
        return bool(row[self._count])
