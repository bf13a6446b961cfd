"""Sums of arrays, of rows and over tokens; on NumPy and CuPy arrays each is a kernel."""

from __future__ import annotations

from typing import Any

from ..runtime.arrays import Array, Namespace, cast, is_cupy
from ..runtime.arrays import over_tokens as by_array_calls
from ..runtime.arrays import sum_to as sum_by_array_calls
from .host import kernels


def added(xp: Namespace, x: Array, y: Array) -> Array:
    """x + y of one shape."""
    if x.shape == y.shape and x.dtype == y.dtype and (cpu := kernels(xp, x, y)) is not None:
        return cpu.compiled("added", (x, y), (x.shape, x.dtype), x.dtype)
    return x + y


def inner(xp: Namespace, x: Array, y: Array, z: Array, u: Array | None, dtype: Any) -> Array:
    """<x, y> + z u of rows x, y (..., D) and numbers z, u (...), u = 1 if it is None: (...) in `dtype`."""
    if (cpu := kernels(xp, x, y, z, u)) is not None:
        each = (x, y, z[..., None], None if u is None else u[..., None])
        return cpu.compiled("inner", each, ((*z.shape, 1), dtype), dtype)[..., 0]
    x, y, z = (cast(xp, a, dtype) for a in (x, y, z))
    return xp.sum(x * y, axis=-1) + (z if u is None else z * cast(xp, u, dtype))


def sum_to(xp: Namespace, x: Array, shape: tuple[int, ...]) -> Array:
    """The transpose of broadcasting: x summed over the axes along which `shape` was stretched to x.shape."""
    if x.shape == shape or (kernel := _kernel(xp, x)) is None:
        return sum_by_array_calls(xp, x, shape)
    return kernel.sum_to(x, shape)


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
