"""Norms of a vector, each with its transpose: root mean square, mean and variance, length."""

from __future__ import annotations

import math
from typing import Any

from ..runtime.arrays import Array, Namespace, cast, is_cupy, over_tokens, shared_heads
from ..runtime.values import range_factors
from .host import kernels, numpy_kernels
from .sums import sum_of_groups

Axes = int | tuple[int, ...]


def rms_norm(xp: Namespace, x: Array, eps: float = 0.0, axis: Axes = -1) -> Array:
    """x / sqrt(mean x^2 + eps), and 0 for 0: sqrt(K) x / n, n = sqrt(|x|^2 + K eps), K numbers along the axes."""
    K = _count(x, axis)
    x, _, n = _with_length(xp, x, K * eps, axis)
    return x * (math.sqrt(K) / n)


def rms_norm_vjp(xp: Namespace, x: Array, dy: Array, eps: float = 0.0, axis: Axes = -1) -> Array:
    """r (dy - y mean(y dy)), r = sqrt(K) / n, y = r x."""
    K = _count(x, axis)
    x, factor, n = _with_length(xp, x, K * eps, axis)
    r = math.sqrt(K) / n
    y = x * r
    return (dy - y * _mean(xp, y * dy, axis)) * (r * factor)


def layer_norm(
    xp: Namespace, x: Array, eps: float = 1e-5, weight: Array | None = None, shift: Array | None = None,
    dtype: Any = None,
) -> Array:  # fmt: skip
    """weight (x - mean x) / sqrt(var x + eps) + shift, over the last axis, in `dtype`, None: that of x.

    weight and shift (K,) are 1 and 0 where they are None. On NumPy arrays it is a kernel.
    """
    dtype = x.dtype if dtype is None else dtype
    if (cpu := kernels(xp, x, weight, shift)) is not None:
        return cpu.compiled("normed", (x, weight, shift), (x.shape, dtype), dtype, math.sqrt(x.shape[-1] * eps))
    x = cast(xp, x, dtype)
    y = rms_norm(xp, x - _mean(xp, x), eps)
    y = y if weight is None else y * cast(xp, weight, dtype)
    return y if shift is None else y + cast(xp, shift, dtype)


def layer_norm_vjp(xp: Namespace, x: Array, dy: Array, eps: float = 1e-5) -> Array:
    """The gradient of rms_norm minus its mean."""
    dx = rms_norm_vjp(xp, x - _mean(xp, x), dy, eps)
    return dx - _mean(xp, dx)


def weighted_layer_norm_vjp(
    xp: Namespace, x: Array, weight: Array | None, shift: Array | None, dy: Array, eps: float = 1e-5
) -> tuple[Array, Array | None, Array | None]:
    """(dx, dweight, dshift) of layer_norm, in the dtype of x; None for what is None.

    On NumPy arrays, and on rows of 16 bits on CuPy, it is a kernel.
    """
    if is_cupy(xp) and x.size and x.dtype.itemsize == 2 and kernels(xp, x, weight, shift, dy) is not None:
        from .cuda import norms

        dx, _, dweight, dshift = norms.backward(x, norms.Norm(eps, True), x.shape[-1], dy, None, weight, shift)
        return dx, dweight, dshift
    if not is_cupy(xp) and x.size and kernels(xp, x, weight, shift, dy) is not None:
        from .cpu import row_norms

        dx, *sums = row_norms.backward(x, weight, shift, row_norms.Norm(eps, centred=True), dy, x.shape[-1])
        dweight, dshift = (None if given is None else d for given, d in zip((weight, shift), sums, strict=True))
        return dx, dweight, dshift
    dweight = None if weight is None else over_tokens(xp, dy * layer_norm(xp, x, eps))
    dx = layer_norm_vjp(xp, x, dy if weight is None else dy * weight, eps)
    return dx, dweight, None if shift is None else over_tokens(xp, dy)


# Lengths: |x|, or with eps n = sqrt(|x|^2 + eps)


def unit(xp: Namespace, x: Array, eps: float = 0.0) -> Array:
    """x / |x|, and 0 for 0; with eps x / sqrt(|x|^2 + eps)."""
    if is_cupy(xp) and (cuda := kernels(xp, x)) is not None:
        return cuda.compiled("over_length", (x, x), (x.shape, x.dtype), x.dtype, math.sqrt(eps))
    x, _, n = _with_length(xp, x, eps)
    return x / n


def unit_vjp(xp: Namespace, x: Array, dy: Array, eps: float = 0.0) -> Array:
    """(dy - y <y, dy>) / n, y = x / n."""
    x, factor, n = _with_length(xp, x, eps)
    y = x / n
    return (dy - y * xp.sum(y * dy, axis=-1, keepdims=True)) / n * factor


def over_length(xp: Namespace, y: Array, x: Array, eps: float = 0.0) -> Array:
    """y / n, and y for n = 0; y (..., heads, K) may have more heads than x, in groups that share one."""
    few, heads = x.shape[-2], y.shape[-2]
    if (cpu := kernels(xp, y, x)) is not None and few:
        groups = y.reshape((*y.shape[:-2], few, heads // few, y.shape[-1]))
        found = cpu.compiled("over_length", (groups, x[..., None, :]), (groups.shape, y.dtype), y.dtype, math.sqrt(eps))
        return found.reshape(y.shape)
    _, factor, n = _with_length(xp, x, eps)
    return y * shared_heads(xp, factor / n, heads)


def over_length_vjp(xp: Namespace, y: Array, x: Array, dz: Array, eps: float = 0.0) -> tuple[Array, Array]:
    """(dy, dx) = (dz / n, -x <dz, y> / n^3)."""
    few = x.shape[-2]
    if (cpu := numpy_kernels(xp, y, x, dz)) is not None and few and y.size and y.shape[-1] == x.shape[-1]:
        shape = *y.shape[:-2], few, y.shape[-2] // few, y.shape[-1]
        rows = y.reshape(shape), x[..., None, :], dz.reshape(shape)
        dx = cpu.compiled("over_length_vjp", rows, (shape, y.dtype), y.dtype, math.sqrt(eps))
        return over_length(xp, dz, x, eps), sum_of_groups(xp, dx.reshape(y.shape), few)
    heads, (x, factor, n) = x.shape[-2], _with_length(xp, x, eps)
    over = factor / n
    wide = shared_heads(xp, over, y.shape[-2])
    along = sum_of_groups(xp, xp.sum(dz * (y * wide), axis=-1, keepdims=True), heads)
    return dz * wide, -(x / n) * along * over


def _with_length(xp: Namespace, x: Array, eps: float, axis: Axes = -1) -> tuple[Array, Array, Array]:
    """(factor x, factor, factor n), factor (..., 1) a power of 2 for each row, from its sum of sizes; 1 for n = 0.

    sqrt(eps) counts as one more entry of the row.
    """
    limit, up, down = range_factors(xp.finfo(x.dtype).bits)
    root = math.sqrt(eps)
    size = xp.sum(xp.abs(x), axis=axis, keepdims=True) + root
    one = xp.ones_like(size)
    small = (size < 1 / limit) & (size > 0)
    factor = xp.where(small, one * up, xp.where(size > limit, one * down, one))
    x = x * factor
    square = xp.sum(x * x, axis=axis, keepdims=True)
    n = xp.sqrt(square + (root * factor) ** 2 if eps else square)
    return x, factor, xp.where(n == 0, xp.ones_like(n), n)


def _mean(xp: Namespace, x: Array, axis: Axes = -1) -> Array:
    """The mean with keepdims; 0 for empty axes."""
    return xp.sum(x, axis=axis, keepdims=True) / max(_count(x, axis), 1)


def _count(x: Array, axis: Axes) -> int:
    return math.prod(x.shape[n] for n in (axis if isinstance(axis, tuple) else (axis,)))
