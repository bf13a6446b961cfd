"""Gate functions and their derivatives, without overflow for any argument; on NumPy and CuPy arrays by kernels."""

from __future__ import annotations

from typing import Any

from ..runtime.arrays import Array, Namespace, cast, device, is_cupy
from .clip import number
from .host import kernels

LOG_DECAY_FLOOR = -1.0e4  # e^{-1e4} is 0 in every dtype: a log decay below it acts as -inf


EXP, ROOT = 2, 4  # kinds of a formula


def _forward(xp: Namespace, name: str, x: Array) -> Array | None:
    """An activation by its kernel; None where array calls compute it."""
    if not x.size or kernels(xp, x) is None:
        return None
    if is_cupy(xp):
        from .cuda import activations

        return activations.forward(name, x)
    from .cpu import activations as loops

    return getattr(loops, name).forward(x) if x.dtype.itemsize > 2 else None


def _backward(xp: Namespace, name: str, x: Array, dy: Array) -> Array | None:
    """dy times the slope of an activation by its kernel; None where array calls compute it."""
    if not x.size or x.shape != dy.shape or kernels(xp, x, dy) is None:
        return None
    if is_cupy(xp):
        from .cuda import activations

        return activations.backward(name, x, dy)
    from .cpu import activations as loops

    return getattr(loops, name).backward(x, dy) if x.dtype == dy.dtype and x.dtype.itemsize > 2 else None


def sigmoid(xp: Namespace, x: Array) -> Array:
    """1 / (1 + e^{-x})."""
    if (y := _forward(xp, "sigmoid", x)) is not None:
        return y
    small = xp.exp(-xp.abs(x))
    return xp.where(x >= 0, number(xp, x, 1), small) / (1 + small)


def sigmoid_vjp(xp: Namespace, x: Array, dy: Array) -> Array:
    if (dx := _backward(xp, "sigmoid", x, dy)) is not None:
        return dx
    small = xp.exp(-xp.abs(x))
    return dy * (small / ((1 + small) * (1 + small)))


def log_sigmoid(xp: Namespace, x: Array) -> Array:
    """-log(1 + e^{-x})."""
    if (y := _forward(xp, "log_sigmoid", x)) is not None:
        return y
    return -softplus(xp, -x)


def log_sigmoid_vjp(xp: Namespace, x: Array, dy: Array) -> Array:
    if (dx := _backward(xp, "log_sigmoid", x, dy)) is not None:
        return dx
    return dy * sigmoid(xp, -x)


def softplus(xp: Namespace, x: Array) -> Array:
    """log(1 + e^x)."""
    if (y := _forward(xp, "softplus", x)) is not None:
        return y
    return xp.where(x > 0, x, _zero(xp, x)) + xp.log1p(xp.exp(-xp.abs(x)))


def _zero(xp: Namespace, x: Array) -> Array:
    return number(xp, x, 0)


def softplus_vjp(xp: Namespace, x: Array, dy: Array) -> Array:
    if (dx := _backward(xp, "softplus", x, dy)) is not None:
        return dx
    return dy * sigmoid(xp, x)


def silu(xp: Namespace, x: Array) -> Array:
    """x sigmoid(x)."""
    if (y := _forward(xp, "silu", x)) is not None:
        return y
    return x * sigmoid(xp, x)


def silu_vjp(xp: Namespace, x: Array, dy: Array) -> Array:
    if (dx := _backward(xp, "silu", x, dy)) is not None:
        return dx
    s = sigmoid(xp, x)
    return dy * s * (1 + x * (1 - s))


def exponential(xp: Namespace, x: Array, dtype: Any) -> Array:
    """e^x in `dtype`."""
    if (cpu := kernels(xp, x)) is not None:
        return cpu.compiled("feature", (x,), (x.shape, dtype), dtype, how=EXP)
    return xp.exp(cast(xp, x, dtype))


def root(xp: Namespace, x: Array, dtype: Any) -> Array:
    """sqrt(max(x, 0)) in `dtype`."""
    if (cpu := kernels(xp, x)) is not None:
        return cpu.compiled("feature", (x,), (x.shape, dtype), dtype, how=ROOT)
    x = cast(xp, x, dtype)
    return xp.sqrt(xp.where(x > 0, x, _zero(xp, x)))


def root_vjp(xp: Namespace, x: Array, dy: Array, dtype: Any) -> Array:
    """dy / (2 sqrt(x)) in `dtype`; 0 from x = 0 down."""
    if (cpu := kernels(xp, x, dy)) is not None:
        return cpu.compiled("feature_vjp", (x, dy), (x.shape, dtype), dtype, how=ROOT)
    x, is_above = cast(xp, x, dtype), x > 0
    return xp.where(is_above, dy / (2 * xp.sqrt(xp.where(is_above, x, xp.ones_like(x)))), xp.zeros_like(x))


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


def log_forget_vjp(
    xp: Namespace, f: Array, cap: float | None, is_log: bool, dy: Array, dtype: Any, out: Any = None
) -> Array:
    """The gradient of f, computed in `dtype`, in `out`, None: the same. 0 where log f is at its floor."""
    out = dtype if out is None else out
    if (cpu := kernels(xp, f, dy)) is not None:
        return cpu.compiled("log_forget_vjp", (f, dy), (f.shape, out), dtype, cap or 0.0, LOG_DECAY_FLOOR, is_log)
    y, dy = soft_cap(xp, f, cap, dtype), cast(xp, dy, dtype)
    slope, value = (xp.ones_like(y), y) if is_log else (sigmoid(xp, -y), -softplus(xp, -y))
    return soft_cap_vjp(xp, f, cap, xp.where(value > LOG_DECAY_FLOOR, slope * dy, xp.zeros_like(dy)), dtype, out)


def soft_cap_vjp(xp: Namespace, x: Array, cap: float | None, dy: Array, dtype: Any, out: Any = None) -> Array:
    """dy times the slope of soft_cap, computed in `dtype`, in `out`, None: the same."""
    out = dtype if out is None else out
    if cap is None:
        return cast(xp, dy, out)
    if (cpu := kernels(xp, x, dy)) is not None:
        return cpu.compiled("capped_vjp", (x, dy), (x.shape, out), dtype, cap)
    return cast(xp, cast(xp, dy, dtype) * (1 - xp.tanh(cast(xp, x, dtype) / cap) ** 2), out)
