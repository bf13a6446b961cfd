"""The softmax of rows and the logarithm of its denominator, each with its transpose.

lse = m + log sum e^{x - m},  m = max x        y = e^{x - lse}        dx = y (dy - <y, dy>)
"""

from __future__ import annotations

import math

from ..runtime.arrays import Array, Namespace, device


def log_sum_exp(xp: Namespace, x: Array) -> Array:
    """lse of rows (..., D): (..., 1); -inf of a row of -inf."""
    if not x.shape[-1]:
        return xp.sum(x, axis=-1, keepdims=True) - math.inf
    m = xp.max(x, axis=-1, keepdims=True)
    finite = xp.where(m == -math.inf, xp.zeros_like(m), m)
    total = xp.sum(xp.exp(x - finite), axis=-1, keepdims=True)
    nothing = total == 0
    return xp.where(nothing, xp.full_like(m, -math.inf), finite + xp.log(xp.where(nothing, xp.ones_like(m), total)))


def shares(xp: Namespace, x: Array, lse: Array) -> Array:
    """e^{x - lse}; 0 of a row of -inf."""
    return xp.exp(x - xp.where(lse == -math.inf, xp.zeros_like(lse), lse))


def softmax(xp: Namespace, x: Array) -> Array:
    """y = e^{x - m} / sum e^{x - m}"""
    if not x.shape[-1]:
        return xp.exp(x)
    m = xp.max(x, axis=-1, keepdims=True)
    y = xp.exp(x - xp.where(m == -math.inf, xp.zeros_like(m), m))
    total = xp.sum(y, axis=-1, keepdims=True)
    return y / xp.where(total == 0, xp.ones_like(total), total)


def softmax_vjp(xp: Namespace, x: Array, dy: Array) -> Array:
    y = softmax(xp, x)
    return y * (dy - xp.sum(y * dy, axis=-1, keepdims=True))


def cross_entropy(xp: Namespace, x: Array, labels: Array, smoothing: float, z: float) -> Array:
    """lse - (1 - s) x_label - s mean x + z lse^2 of rows (R, D)."""
    lse = log_sum_exp(xp, x)[:, 0]
    own = xp.sum(xp.where(_is_label(xp, x, labels), x, xp.zeros_like(x)), axis=-1)  # other columns may be -inf
    loss = lse - (1 - smoothing) * own
    loss = loss + z * lse * lse if z else loss
    return loss - smoothing * xp.mean(x, axis=-1) if smoothing else loss


def cross_entropy_vjp(xp: Namespace, x: Array, labels: Array, smoothing: float, z: float, d: Array) -> Array:
    lse = log_sum_exp(xp, x)
    p = shares(xp, x, lse) * (1 + 2 * z * lse)
    hot = xp.astype(_is_label(xp, x, labels), x.dtype)
    return d[:, None] * (p - (1 - smoothing) * hot - smoothing / x.shape[-1])


def _is_label(xp: Namespace, x: Array, labels: Array) -> Array:
    """(R, D): which column is the label of a row."""
    return labels[:, None] == xp.arange(x.shape[-1], dtype=labels.dtype, device=device(x))
