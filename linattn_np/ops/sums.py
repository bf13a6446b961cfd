"""Sums of arrays, of rows and over tokens; on NumPy arrays each is a kernel."""

from __future__ import annotations

import math
from typing import Any

from ..runtime.arrays import Array, Namespace, cast
from ..runtime.arrays import over_tokens as by_array_calls
from ..runtime.arrays import sum_to as sum_by_array_calls
from .host import numpy_kernels


def added(xp: Namespace, x: Array, y: Array) -> Array:
    """x + y of one shape."""
    if x.shape == y.shape and x.dtype == y.dtype and (cpu := numpy_kernels(xp, x, y)) is not None:
        return cpu.compiled("added", (x, y), (x.shape, x.dtype), x.dtype)
    return x + y


def inner(xp: Namespace, x: Array, y: Array, z: Array, u: Array | None, dtype: Any) -> Array:
    """<x, y> + z u of rows x, y (..., D) and numbers z, u (...), u = 1 if it is None: (...) in `dtype`."""
    if (cpu := numpy_kernels(xp, x, y, z, u)) is not None:
        each = (x, y, z[..., None], None if u is None else u[..., None])
        return cpu.compiled("inner", each, ((*z.shape, 1), dtype), dtype)[..., 0]
    x, y, z = (cast(xp, a, dtype) for a in (x, y, z))
    return xp.sum(x * y, axis=-1) + (z if u is None else z * cast(xp, u, dtype))


def sum_to(xp: Namespace, x: Array, shape: tuple[int, ...]) -> Array:
    """The transpose of broadcasting: x summed over the axes along which `shape` was stretched to x.shape."""
    if numpy_kernels(xp, x) is None or not x.size or not x.flags.c_contiguous:
        return sum_by_array_calls(xp, x, shape)
    from .cpu import sums

    return sums.sum_to(x, shape)


def over_tokens(xp: Namespace, x: Array, axes: int = 1) -> Array:
    """The sum over batch and tokens: all axes but the last ones."""
    if numpy_kernels(xp, x) is None or not x.size or not x.flags.c_contiguous:
        return by_array_calls(xp, x, axes)
    from .cpu.sums import over_first

    lead = x.ndim - axes
    return over_first(x.reshape(1, math.prod(x.shape[:lead]), math.prod(x.shape[lead:]))).reshape(x.shape[lead:])
