"""Sums of CuPy arrays over leading and over stretched axes, in an order that depends on the shapes alone."""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt, prod
from typing import Any, NamedTuple

import numpy as np

from ...runtime.arrays import Array, name_of
from ...runtime.cuda import launch, record
from ...runtime.cuda.elements import Constants
from .arguments import SUMS, SUMS_PART
from .formulas import KINDS
from .unit_rows import THREADS

SOURCE = "ops/sums.cu"
FEW = 128  # terms that one block of threads adds
COLUMNS = 32  # of a block, at most
MOST = 8  # arrays of a launch
NO_SUM = (0,) * len(SUMS_PART.fields)


def constants(dtype: str) -> Constants:
    """The constants of sums of a dtype."""
    return (("LA_DTYPE", KINDS[dtype]),)


def over_middle(x: Array, dtype: Any = None) -> Array:
    """Dense x (count, terms, width) summed over its terms: (count, width), in `dtype`, None: that of x."""
    (found,) = each_over_middle([x], [x.dtype if dtype is None else dtype])
    return found


def each_over_middle(arrays: Sequence[Array | None], outs: Sequence[Any]) -> list[Any]:
    """The sums of over_middle of several arrays by launches that they share; None of None.

    outs: of each the dtype of its sum, or a dense array of so many numbers, which is filled.
    """
    found: list[Any] = [*arrays]
    left = [n for n, x in enumerate(arrays) if x is not None]
    while left:
        sums = {n: _Sum.of(found[n], outs[n]) for n in left}
        for dtype in dict.fromkeys(name_of(s.x.dtype) for s in sums.values()):
            alike = [s for s in sums.values() if name_of(s.x.dtype) == dtype]
            for at in range(0, len(alike), MOST):
                _launch(dtype, alike[at : at + MOST])
        found = [sums[n].y if n in sums else y for n, y in enumerate(found)]
        left = [n for n in left if sums[n].parts > 1]  # sums of blocks of terms
    return [None if x is None else y.reshape(x.shape[0], x.shape[2]) for x, y in zip(arrays, found, strict=True)]


class _Sum(NamedTuple):
    """x (count, terms, width) and its sums y of each `block` terms, (count, parts, width) if there are several."""

    x: Array
    y: Array
    block: int
    parts: int

    @classmethod
    def of(cls, x: Array, out: Any) -> _Sum:
        """out: an array that is filled, or the dtype of a new one, where there is one part."""
        count, terms, width = x.shape
        block = terms if terms <= FEW else isqrt(terms)
        parts = -(-terms // block) if block else 1
        if parts > 1:
            wide = np.dtype("float64" if name_of(x.dtype) == "float64" else "float32")
            return cls(x, record.empty((count, parts, width), wide), block, parts)
        return cls(
            x, record.empty((count, parts, width), out) if isinstance(out, np.dtype | type) else out, block, parts
        )


def _launch(dtype: str, sums: Sequence[_Sum]) -> None:
    fields, blocks = list[int](), 0
    for x, y, block, parts in sums:
        count, terms, width = x.shape
        fields += (x.data.ptr, y.data.ptr, terms, width, block, parts, blocks, KINDS[name_of(y.dtype)])
        blocks += count * parts * -(-width // COLUMNS)
    fields += NO_SUM * (MOST - len(sums))
    arrays = tuple(y for s in sums for y in s[:2])
    launch.launch(SOURCE, "sums", constants(dtype), blocks, THREADS, 0, SUMS.pack(of=fields, count=len(sums)), arrays)


def over_tokens(x: Array, axes: int = 1, dtype: Any = None) -> Array:
    """The sum of a dense array over all axes but the last ones."""
    (found,) = each_over_tokens([x], axes, dtype)
    return found


def each_over_tokens(arrays: Sequence[Array | None], axes: int = 1, dtype: Any = None) -> list[Any]:
    """over_tokens of several arrays by launches that they share; None of None."""
    rows = [None if x is None else x.reshape(1, prod(x.shape[: x.ndim - axes]), -1) for x in arrays]
    outs = [None if x is None else x.dtype if dtype is None else dtype for x in arrays]
    found = each_over_middle(rows, outs)
    return [None if x is None else y.reshape(x.shape[x.ndim - axes :]) for x, y in zip(arrays, found, strict=True)]


def sum_to(x: Array, shape: tuple[int, ...]) -> Array:
    """A dense x summed over the axes along which `shape` was stretched to x.shape."""
    lead, at = x.ndim - len(shape), list(x.shape)
    n = 0
    while n < x.ndim:
        end = n
        while end < x.ndim and (end < lead or shape[end - lead] == 1) and at[end] != 1:
            end += 1
        if end > n:  # neighbouring axes as one
            x = over_middle(x.reshape(prod(at[:n]), prod(at[n:end]), prod(at[end:])))
            at[n:end] = [1] * (end - n)
            x = x.reshape(at)
        n = max(end, n + 1)
    return x.reshape(shape)
