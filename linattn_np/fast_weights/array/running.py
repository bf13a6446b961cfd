"""A recurrence of matrices, y_t = a_t y_{t-1} + x_t, t = 1 .. n, and its transpose; of NumPy arrays in place."""

from __future__ import annotations

from math import prod
from typing import Any

from ...runtime.arrays import Array, Namespace, is_numpy
from ..fused import matmul, stacked


def running(xp: Namespace, a: Any, first: Array, x: Array) -> Array:
    """y (..., n, K, M) from y_0 = first (..., K, M), x like y, a (..., n, 1), None: 1. x may become y."""
    found, y = list[Array](), first
    for t in range(x.shape[-3]):
        y = _added(xp, x[..., t, :, :], y if a is None else a[..., t, :, None] * y)
        found.append(y)
    return x if is_numpy(xp) else stacked(xp, found, axis=-3)


def running_vjp(xp: Namespace, a: Any, first: Array, y: Array, dy: Array, dlast: Any) -> tuple[Any, Array, Array]:
    """(da, dfirst, dx) from the cotangents of y, which may become dx, and more of its last one."""
    found, down = list[Array](), dlast
    for t in reversed(range(dy.shape[-3])):
        d = _added(xp, dy[..., t, :, :], down)
        found.append(d)
        down = d if a is None else a[..., t, :, None] * d
    dx = dy if is_numpy(xp) else stacked(xp, found[::-1], axis=-3)
    if a is None:
        return None, down, dx
    each = [_dots(xp, dx[..., :1, :, :], first[..., None, :, :]), _dots(xp, dx[..., 1:, :, :], y[..., :-1, :, :])]
    return xp.concat(each, axis=-2), down, dx


def _added(xp: Namespace, x: Array, y: Array) -> Array:
    """x + y, of NumPy arrays in x."""
    if not is_numpy(xp):
        return x + y
    x += y
    return x


def _dots(xp: Namespace, x: Array, y: Array) -> Array:
    """<x_t, y_t> (..., n, 1)."""
    x, y = (xp.reshape(z, (*z.shape[:-2], 1, prod(z.shape[-2:]))) for z in (x, y))
    return matmul(xp, x, xp.matrix_transpose(y))[..., 0]
