"""Gate functions and their derivatives, without overflow for any argument."""

from __future__ import annotations

from typing import Any

from ..runtime.arrays import Array, Namespace, cast, device, is_numpy
from .host import kernels

LOG_DECAY_FLOOR = -1.0e4  # e^{-1e4} is 0 in every dtype: a log decay below it acts as -inf


def sigmoid(xp: Namespace, x: Array) -> Array:
    """1 / (1 + e^{-x})."""
    small = xp.exp(-xp.abs(x))
    return xp.where(x >= 0, _number(xp, x, 1), small) / (1 + small)


def sigmoid_vjp(xp: Namespace, x: Array, dy: Array) -> Array:
    small = xp.exp(-xp.abs(x))
    return dy * (small / ((1 + small) * (1 + small)))


def log_sigmoid(xp: Namespace, x: Array) -> Array:
    """-log(1 + e^{-x})."""
    return -softplus(xp, -x)


def log_sigmoid_vjp(xp: Namespace, x: Array, dy: Array) -> Array:
    return dy * sigmoid(xp, -x)


def softplus(xp: Namespace, x: Array) -> Array:
    """log(1 + e^x)."""
    return xp.where(x > 0, x, _zero(xp, x)) + xp.log1p(xp.exp(-xp.abs(x)))


def _zero(xp: Namespace, x: Array) -> Array:
    return _number(xp, x, 0)


def _number(xp: Namespace, x: Array, value: float) -> Array:
    """A number for xp.where: a scalar in NumPy, where full_like takes half the time of a small softplus."""
    return x.dtype.type(value) if is_numpy(xp) else xp.full_like(x, value)


def softplus_vjp(xp: Namespace, x: Array, dy: Array) -> Array:
    return dy * sigmoid(xp, x)


def silu(xp: Namespace, x: Array) -> Array:
    """x sigmoid(x)."""
    return x * sigmoid(xp, x)


def silu_vjp(xp: Namespace, x: Array, dy: Array) -> Array:
    s = sigmoid(xp, x)
    return dy * s * (1 + x * (1 - s))


def soft_cap(xp: Namespace, x: Array, cap: float | None, dtype: Any) -> Array:
    """cap tanh(x / cap) in `dtype`: close to x for small x, bounded by +-cap; None: x."""
    if (cpu := kernels(xp, x)) is not None:
        return cpu.compiled("capped", (x,), (x.shape, dtype), dtype, cap or 0.0)
    x = cast(xp, x, dtype)
    return x if cap is None else cap * xp.tanh(x / cap)


def log_forget(xp: Namespace, f: Array, cap: float | None, is_log: bool, dtype: Any) -> Array:
    """log sigmoid(y), y = soft_cap(f), or y itself if it `is_log`; at least LOG_DECAY_FLOOR."""
    if (cpu := kernels(xp, f)) is not None:
        return cpu.compiled("log_forget", (f,), (f.shape, dtype), dtype, cap or 0.0, LOG_DECAY_FLOOR, is_log)
    y = soft_cap(xp, f, cap, dtype)
    return xp.maximum(y if is_log else -softplus(xp, -y), xp.asarray(LOG_DECAY_FLOOR, dtype=dtype, device=device(y)))


def log_forget_vjp(xp: Namespace, f: Array, cap: float | None, is_log: bool, dy: Array, dtype: Any) -> Array:
    """The gradient of f, in `dtype`: 0 where log f is at its floor."""
    if (cpu := kernels(xp, f, dy)) is not None:
        return cpu.compiled("log_forget_vjp", (f, dy), (f.shape, dtype), dtype, cap or 0.0, LOG_DECAY_FLOOR, is_log)
    y, dy = soft_cap(xp, f, cap, dtype), cast(xp, dy, dtype)
    slope, value = (xp.ones_like(y), y) if is_log else (sigmoid(xp, -y), -softplus(xp, -y))
    return soft_cap_vjp(xp, f, cap, xp.where(value > LOG_DECAY_FLOOR, slope * dy, xp.zeros_like(dy)), dtype)


def soft_cap_vjp(xp: Namespace, x: Array, cap: float | None, dy: Array, dtype: Any) -> Array:
    """dy times the slope of soft_cap, in `dtype`."""
    if cap is not None and (cpu := kernels(xp, x, dy)) is not None:
        return cpu.compiled("capped_vjp", (x, dy), (x.shape, dtype), dtype, cap)
    dy = cast(xp, dy, dtype)
    return dy if cap is None else dy * (1 - xp.tanh(cast(xp, x, dtype) / cap) ** 2)


def clip(xp: Namespace, x: Array, limits: tuple[float, float]) -> Array:
    """x inside the limits."""
    low, high = limits
    x = xp.where(x < low, _number(xp, x, low), x)
    return x if high == float("inf") else xp.where(x > high, _number(xp, x, high), x)


def clip_vjp(xp: Namespace, x: Array, limits: tuple[float, float], dy: Array) -> Array:
    """dy inside the limits, 0 where x was clipped."""
    return xp.where((x >= limits[0]) & (x <= limits[1]), dy, xp.zeros_like(dy))
