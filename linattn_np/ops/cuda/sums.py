"""Sums of CuPy arrays over leading and over stretched axes, in an order that depends on the shapes alone."""

from __future__ import annotations

from math import isqrt, prod
from typing import Any

import numpy as np

from ...runtime.arrays import Array, name_of
from ...runtime.cuda import launch, record
from ...runtime.cuda.elements import Constants
from .arguments import SUMS
from .formulas import KINDS
from .unit_rows import THREADS

SOURCE = "ops/sums.cu"
FEW = 128  # terms that one block of threads adds
COLUMNS = 32  # of a block, at most


def constants(dtype: str, out: str) -> Constants:
    """The constants of sums of a dtype, stored in another."""
    return ("LA_DTYPE", KINDS[dtype]), ("LA_OUT", KINDS[out])


def over_middle(x: Array, dtype: Any = None, out: Array | None = None) -> Array:
    """Dense x (count, terms, width) summed over its terms: (count, width), in `dtype`, None: that of x.

    out: a dense array of so many numbers that is filled.
    """
    dtype = out.dtype if out is not None else x.dtype if dtype is None else dtype
    count, terms, width = x.shape
    blocks = [terms] if terms <= FEW else [isqrt(terms), terms]
    for block in blocks:
        parts = -(-terms // block) if block else 1
        wide = "float64" if name_of(x.dtype) == "float64" else "float32"
        own = (count, parts, width)
        y = record.empty(own, np.dtype(wide)) if parts > 1 else record.empty(own, dtype) if out is None else out
        packed = SUMS.pack(x=x.data.ptr, y=y.data.ptr, terms=terms, width=width, block=block, parts=parts)
        grid = count * parts * -(-width // COLUMNS)
        launch.launch(SOURCE, "sums", constants(name_of(x.dtype), name_of(y.dtype)), grid, THREADS, 0, packed, (x, y))
        x, terms = y, parts
    return x.reshape(count, width)


def over_tokens(x: Array, axes: int = 1, dtype: Any = None) -> Array:
    """The sum of a dense array over all axes but the last ones."""
    lead, own = x.ndim - axes, x.shape[x.ndim - axes :]
    return over_middle(x.reshape(1, prod(x.shape[:lead]), prod(own)), dtype).reshape(own)


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
