"""Norms of a vector, each with its transpose: root mean square, mean and variance, length."""

from __future__ import annotations

import math

from ..ground.namespace import Array, Namespace

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
    """The norm's gradient less its mean."""
    dx = rms_norm_vjp(xp, x - _mean(xp, x, -1), dy, eps)
    return dx - _mean(xp, dx, -1)


def unit(xp: Namespace, x: Array) -> Array:
    """x / |x|, and 0 for 0."""
    n = _length(xp, x)
    return x / n


def unit_vjp(xp: Namespace, x: Array, dy: Array) -> Array:
    """(dy - y <y, dy>) / |x|."""
    n = _length(xp, x)
    y = x / n
    return (dy - y * xp.sum(y * dy, axis=-1, keepdims=True)) / n


def _mean(xp: Namespace, x: Array, axis: Axes) -> Array:
    """The mean along axes that stay; 0 of nothing."""
    count = math.prod(x.shape[n] for n in (axis if isinstance(axis, tuple) else (axis,)))
    return xp.sum(x, axis=axis, keepdims=True) / max(count, 1)


def _length(xp: Namespace, x: Array) -> Array:
    n = xp.sqrt(xp.sum(x * x, axis=-1, keepdims=True))
    return xp.where(n == 0, xp.ones_like(n), n)


def _over_rms(xp: Namespace, x: Array, eps: float, axis: Axes) -> Array:
    """1 / sqrt(mean x^2 + eps); 1 where that is 0."""
    square = _mean(xp, x * x, axis) + eps
    return 1 / xp.sqrt(xp.where(square == 0, xp.ones_like(square), square))
