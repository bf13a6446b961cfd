"""Copies and sums of arrays: kernels while a call is recorded, and else array calls, which begin sooner.

Both have the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..ops import sums
from ..ops.host import kernels
from ..ops.host import zeros_like as zeros_by_kernel
from ..runtime.arrays import Array, Namespace, count_dtype, is_cupy
from ..runtime.recorder import active
from .types import Tree


def _kernels(xp: Namespace, *arrays: Any) -> Any:
    return None if active.recorder is None else kernels(xp, *arrays)


def copied(xp: Namespace, x: Array) -> Array:
    """x in memory of its own."""
    if (own := _kernels(xp, x)) is None:
        return xp.asarray(x, copy=True)
    return own.compiled("copy", (x,), (tuple(x.shape), x.dtype), "float64" if x.dtype.itemsize == 8 else "float32")


def zeros_like(xp: Namespace, x: Array) -> Array:
    """Zeros in the shape and dtype of x."""
    return xp.zeros_like(x) if _kernels(xp) is None else zeros_by_kernel(xp, x)


def added(xp: Namespace, x: Array, y: Array) -> Array:
    """x + y of one shape."""
    return x + y if _kernels(xp, x, y) is None else sums.added(xp, x, y)


def difference(xp: Namespace, x: Array, y: Array) -> Array:
    """x - y of one shape."""
    return x - y if _kernels(xp, x, y) is None else sums.difference(xp, x, y)


def each(of: Callable[..., Array], xp: Namespace, *trees: Tree) -> Tree:
    """A function of arrays that are there in all trees."""
    return tuple(of(xp, *arrays) for arrays in zip(*trees, strict=True))


def counts(xp: Namespace, n: int, shape: tuple[int, ...], where: Any) -> Array:
    """Whole numbers n: the kernels fill arrays of float64 of the same bits."""
    if (own := _kernels(xp)) is None:
        return xp.full(shape, n, dtype=count_dtype(xp), device=where)
    to, number = own.working(shape, np.dtype(np.int64)), float(np.int64(n).view(np.float64))
    if is_cupy(xp):
        own.compiled("filled", (), to.view(np.float64), "float64", number)
    else:
        own.put(to.view(np.float64), own.constant_of(number, np.dtype(np.float64)))
    return to
