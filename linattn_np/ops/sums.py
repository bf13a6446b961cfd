"""Sums of arrays, of rows and over tokens; on NumPy and CuPy arrays each is a kernel."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..runtime.arrays import Array, Namespace, cast, compute_dtype, is_cupy
from ..runtime.arrays import over_tokens as by_array_calls
from ..runtime.arrays import sum_to as sum_by_array_calls
from .host import kernels, numpy_kernels


def added(xp: Namespace, x: Array, y: Array, dtype: Any = None) -> Array:
    """x + y of one shape in `dtype`; None: in that of the wider one."""
    if x.shape == y.shape and (cpu := kernels(xp, x, y)) is not None:
        wider = max(x.dtype, y.dtype, key=lambda dtype: dtype.itemsize)
        if dtype is not None or x.dtype == y.dtype or wider.itemsize > 2:
            out = wider if dtype is None else np.dtype(dtype)
            return cpu.compiled("added", (x, y), (x.shape, out), max(wider, out, key=lambda dtype: dtype.itemsize))
    if dtype is None:
        return x + y
    wide = compute_dtype(xp, x, y)
    return cast(xp, cast(xp, x, wide) + cast(xp, y, wide), dtype)


def difference(xp: Namespace, x: Array, y: Array) -> Array:
    """x - y of one shape."""
    if kernels(xp, x, y) is not None:
        from .product import multiple

        return added(xp, x, multiple(xp, -1.0, y, x.dtype))
    return x - y


def inner(xp: Namespace, x: Array, y: Array, z: Array | None, u: Array | None, dtype: Any) -> Array:
    """<x, y> + z u of rows x, y (..., D) and numbers z, u (...), z = 0 and u = 1 if None: (...) in `dtype`."""
    if (cpu := kernels(xp, x, y, z, u)) is not None:
        each = (x, y, *(None if a is None else a[..., None] for a in (z, u)))
        return cpu.compiled("inner", each, ((*x.shape[:-1], 1), dtype), dtype)[..., 0]
    along = xp.sum(cast(xp, x, dtype) * cast(xp, y, dtype), axis=-1)
    if z is None:
        return along
    return along + (cast(xp, z, dtype) if u is None else cast(xp, z, dtype) * cast(xp, u, dtype))


def inner_of_matrices(xp: Namespace, x: Array, y: Array, dtype: Any) -> Array:
    """<x, y> of matrices (..., K, V): (...) in `dtype`."""
    if (cpu := numpy_kernels(xp, x, y)) is not None:
        rows = [a.reshape((*a.shape[:-2], a.shape[-2] * a.shape[-1])) for a in (x, y)]
        return cpu.compiled("inner", rows, ((*x.shape[:-2], 1), dtype), dtype)[..., 0]
    return cast(xp, xp.sum(x * y, axis=(-2, -1)), dtype)


def row_inner(xp: Namespace, x: Array, y: Array, dtype: Any, out: Any = None) -> Array:
    """<x, y> of rows (..., D) that are broadcast: (...), computed in `dtype`, in `out`; None: the same."""
    out = dtype if out is None else out
    if x.shape[-1] == y.shape[-1] and (cpu := kernels(xp, x, y)) is not None:
        shape = np.broadcast_shapes(x.shape, y.shape)
        return cpu.compiled("inner", (x, y), ((*shape[:-1], 1), out), dtype)[..., 0]
    return cast(xp, xp.sum(cast(xp, x, dtype) * cast(xp, y, dtype), axis=-1), out)


def over_rows(xp: Namespace, x: Array) -> Array:
    """The sum of the rows of matrices (..., n, D): (..., D)."""
    if _kernel(xp, x) is None:
        return xp.sum(x, axis=-2)
    return sum_to(xp, x, (*x.shape[:-2], 1, x.shape[-1]))[..., 0, :]


def sum_to(xp: Namespace, x: Array, shape: tuple[int, ...]) -> Array:
    """The transpose of broadcasting: x summed over the axes along which `shape` was stretched to x.shape."""
    if x.shape == shape or (kernel := _kernel(xp, x)) is None:
        return sum_by_array_calls(xp, x, shape)
    return kernel.sum_to(x, shape)


def sum_of_groups(xp: Namespace, x: Array, heads: int) -> Array:
    """The transpose of shared_heads: x (..., many, D) summed over the groups that share one of `heads`."""
    *lead, many, D = x.shape
    if many == heads or not heads:
        return x
    parts = xp.reshape(x, (*lead, heads, many // heads, D))
    return xp.reshape(sum_to(xp, parts, (*lead, heads, 1, D)), (*lead, heads, D))


def over_tokens(xp: Namespace, x: Array, axes: int = 1) -> Array:
    """The sum over batch and tokens: all axes but the last ones."""
    kernel = _kernel(xp, x)
    return by_array_calls(xp, x, axes) if kernel is None else kernel.over_tokens(x, axes)


def _kernel(xp: Namespace, x: Array) -> Any:
    """The module of sums of dense arrays, or None."""
    if kernels(xp, x) is None or not x.size or not x.flags.c_contiguous:
        return None
    from .cpu import sums

    if is_cupy(xp):
        from .cuda import sums  # type: ignore[no-redef]
    return sums
