"""Norms of a vector, each with its transpose: root mean square, mean and variance, length."""

from __future__ import annotations

import math

from ..runtime.arrays import Array, Namespace, shared_heads, sum_of_groups
from ..runtime.values import range_factors

Axes = int | tuple[int, ...]


def rms_norm(xp: Namespace, x: Array, eps: float = 0.0, axis: Axes = -1) -> Array:
    """x / sqrt(mean x^2 + eps)."""
    return x * _over_rms(xp, x, eps, axis)


def rms_norm_vjp(xp: Namespace, x: Array, dy: Array, eps: float = 0.0, axis: Axes = -1) -> Array:
    """r (dy - x r^2 mean(x dy)), r = 1 / sqrt(mean x^2 + eps)."""
    r = _over_rms(xp, x, eps, axis)
    return r * (dy - x * (r * r * _mean(xp, x * dy, axis)))


def layer_norm(xp: Namespace, x: Array, eps: float = 1e-5) -> Array:
    """(x - mean x) / sqrt(var x + eps), over the last axis."""
    return rms_norm(xp, x - _mean(xp, x, -1), eps)


def layer_norm_vjp(xp: Namespace, x: Array, dy: Array, eps: float = 1e-5) -> Array:
    """The gradient of rms_norm minus its mean."""
    dx = rms_norm_vjp(xp, x - _mean(xp, x, -1), dy, eps)
    return dx - _mean(xp, dx, -1)


# Lengths: |x|, or with eps n = sqrt(|x|^2 + eps)


def unit(xp: Namespace, x: Array, eps: float = 0.0) -> Array:
    """x / |x|, and 0 for 0; with eps x / sqrt(|x|^2 + eps)."""
    x, _, n = _with_length(xp, x, eps)
    return x / n


def unit_vjp(xp: Namespace, x: Array, dy: Array, eps: float = 0.0) -> Array:
    """(dy - y <y, dy>) / n, y = x / n."""
    x, factor, n = _with_length(xp, x, eps)
    y = x / n
    return (dy - y * xp.sum(y * dy, axis=-1, keepdims=True)) / n * factor


def over_length(xp: Namespace, y: Array, x: Array, eps: float = 0.0) -> Array:
    """y / n, and y for n = 0; y (..., heads, K) may have more heads than x, in groups that share one."""
    _, factor, n = _with_length(xp, x, eps)
    return y * shared_heads(xp, factor / n, y.shape[-2])


def over_length_vjp(xp: Namespace, y: Array, x: Array, dz: Array, eps: float = 0.0) -> tuple[Array, Array]:
    """(dy, dx) = (dz / n, -x <dz, y> / n^3)."""
    heads, (x, factor, n) = x.shape[-2], _with_length(xp, x, eps)
    over = factor / n
    wide = shared_heads(xp, over, y.shape[-2])
    along = sum_of_groups(xp, xp.sum(dz * (y * wide), axis=-1, keepdims=True), heads)
    return dz * wide, -(x / n) * along * over


def _with_length(xp: Namespace, x: Array, eps: float) -> tuple[Array, Array, Array]:
    """(factor x, factor, factor n), factor (..., 1) a power of 2 for each row; 1 for n = 0.

    sqrt(eps) counts as one more entry of the row.
    """
    limit, up, down = range_factors(xp.finfo(x.dtype).bits)
    one = xp.ones_like(x[..., :1])
    if not x.shape[-1]:
        return x, one, one
    largest = xp.max(xp.abs(x), axis=-1, keepdims=True)
    root = one * math.sqrt(eps) if eps else None
    if root is not None:
        largest = xp.where(largest < root, root, largest)
    small = (largest < 1 / limit) & (largest > 0)
    factor = xp.where(small, one * up, xp.where(largest > limit, one * down, one))
    x = x * factor
    square = xp.sum(x * x, axis=-1, keepdims=True)
    n = xp.sqrt(square if root is None else square + (root * factor) ** 2)
    return x, factor, xp.where(n == 0, xp.ones_like(n), n)


def _mean(xp: Namespace, x: Array, axis: Axes) -> Array:
    """The mean with keepdims; 0 for empty axes."""
    count = math.prod(x.shape[n] for n in (axis if isinstance(axis, tuple) else (axis,)))
    return xp.sum(x, axis=axis, keepdims=True) / max(count, 1)


def _over_rms(xp: Namespace, x: Array, eps: float, axis: Axes) -> Array:
    """1 / sqrt(mean x^2 + eps); 1 where that is 0."""
    square = _mean(xp, x * x, axis) + eps
    return 1 / xp.sqrt(xp.where(square == 0, xp.ones_like(square), square))
