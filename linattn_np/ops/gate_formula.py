"""Gates from their raw projections.

    log_decay   g = -e^{A_log} softplus(a),   a = raw + bias                    (Mamba-2)
                da = -e^{A_log} sigmoid(a) dg,   dA_log = sum of g dg
    bounded     y = bound sigmoid(x),   x = e^{A_log} (raw + bias)   (KDA with a lower bound; strengths)
                dx = bound sigmoid(x) sigmoid(-x) dy,   da = e^{A_log} dx,   dA_log = sum of x dx

    dbias = sum over tokens of da

raw (..., T, H), or (..., T, H, K) with A_log (H,). On NumPy arrays g and y are one kernel each, on float32
CuPy arrays each line.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

from ..runtime.arrays import Array, Namespace, cast, is_cupy
from .gates import sigmoid, softplus
from .host import kernels
from .sums import sum_to


class Bounded(NamedTuple):
    """The parameters of `bounded`; A_log None: its factor is 1."""

    bound: float
    A_log: Array | None = None  # (H,)
    bias: Array | None = None  # of each number of a token


def log_decay(xp: Namespace, raw: Array, A_log: Array, bias: Array | None, dtype: Any, by_channel: bool) -> Array:
    """g, in `dtype`; by_channel: raw has an axis of channels."""
    if (kernel := _kernel(xp, raw, dtype)) is not None:
        return kernel.log_decay(xp, raw, A_log, bias, _sizes(raw, by_channel))
    if (cpu := kernels(xp, raw, A_log, bias)) is not None:
        return cpu.compiled("log_decay", (raw, bias, _by_head(A_log, by_channel)), (raw.shape, dtype), dtype)
    return -_rate(xp, A_log, dtype, by_channel) * softplus(xp, _raw(xp, raw, bias, dtype))


def log_decay_vjp(
    xp: Namespace, raw: Array, A_log: Array, bias: Array | None, dg: Array, by_channel: bool
) -> tuple[Array, Array, Array | None]:
    """Gradients of raw, A_log and bias; dg in the dtype of the computation."""
    if (kernel := _kernel(xp, raw, dg.dtype)) is not None:
        return kernel.log_decay_vjp(xp, raw, A_log, bias, dg, _sizes(raw, by_channel))
    if (cpu := kernels(xp, raw, A_log, bias, dg)) is not None:
        arrays = raw, bias, _by_head(A_log, by_channel), dg
        da, rate = cpu.both("log_decay_vjp", arrays, (raw.shape, dg.dtype), dg.dtype)
        dA = sum_to(xp, rate, _by_head(A_log, by_channel).shape).reshape(A_log.shape)
        return da, dA, None if bias is None else sum_to(xp, da, tuple(bias.shape))
    rate, a = _rate(xp, A_log, dg.dtype, by_channel), _raw(xp, raw, bias, dg.dtype)
    da, g = -rate * sigmoid(xp, a) * dg, -rate * softplus(xp, a)
    dA = _over_tokens(xp, dg, g, A_log, by_channel)
    return da, dA, None if bias is None else sum_to(xp, da, tuple(bias.shape))


def bounded(xp: Namespace, raw: Array, how: Bounded, dtype: Any, by_channel: bool) -> Array:
    """bound sigmoid(e^{A_log} (raw + bias)), in `dtype`."""
    if (kernel := _kernel(xp, raw, dtype)) is not None:
        return kernel.bounded(xp, raw, *how, _sizes(raw, by_channel))
    if (cpu := kernels(xp, raw, how.A_log, how.bias)) is not None:
        arrays = raw, how.bias, None if how.A_log is None else _by_head(how.A_log, by_channel)
        return cpu.compiled("bounded", arrays, (raw.shape, dtype), dtype, how.bound)
    x = _raw(xp, raw, how.bias, dtype)
    if how.A_log is not None:
        x = _rate(xp, how.A_log, dtype, by_channel) * x
    return how.bound * sigmoid(xp, x)


def bounded_vjp(
    xp: Namespace, raw: Array, how: Bounded, dy: Array, by_channel: bool
) -> tuple[Array, Array | None, Array | None]:
    """Gradients of raw, A_log and bias; dy in the dtype of the computation."""
    if (kernel := _kernel(xp, raw, dy.dtype)) is not None:
        return kernel.bounded_vjp(xp, raw, *how, dy, _sizes(raw, by_channel))
    if (cpu := kernels(xp, raw, how.A_log, how.bias, dy)) is not None:
        by_head: Any = None if how.A_log is None else _by_head(how.A_log, by_channel)
        arrays = raw, how.bias, by_head, dy
        da, rate = cpu.both("bounded_vjp", arrays, (raw.shape, dy.dtype), dy.dtype, how.bound, more=by_head is not None)
        dA = None if by_head is None else sum_to(xp, rate, by_head.shape).reshape(-1)
        return da, dA, None if how.bias is None else sum_to(xp, da, tuple(how.bias.shape))
    x, rate, dA = _raw(xp, raw, how.bias, dy.dtype), None, None
    if how.A_log is not None:
        rate = _rate(xp, how.A_log, dy.dtype, by_channel)
        x = rate * x
    small = xp.exp(-xp.abs(x))
    dx = how.bound * dy * (small / (1 + small) ** 2)
    if how.A_log is not None:
        dA = _over_tokens(xp, dx, x, how.A_log, by_channel)
    da = dx if rate is None else rate * dx
    return da, dA, None if how.bias is None else sum_to(xp, da, tuple(how.bias.shape))


def _over_tokens(xp: Namespace, d: Array, x: Array, A_log: Array, by_channel: bool) -> Array:
    """Sum of d x in the shape of A_log; infinite entries have no gradient."""
    product = d * xp.where(xp.isinf(x), xp.zeros_like(x), x)
    return sum_to(xp, xp.sum(product, axis=-1) if by_channel else product, tuple(A_log.shape))


def _kernel(xp: Namespace, raw: Array, dtype: Any) -> Any:
    """The module of kernels that supports the call, or None."""
    if not is_cupy(xp) or dtype != xp.float32 or not prod(raw.shape):
        return None
    from .cuda import gate_formula

    return gate_formula if gate_formula.takes(raw) else None


def _sizes(raw: Array, by_channel: bool) -> tuple[int, int]:
    """(numbers per head, numbers per token)."""
    return (raw.shape[-1], prod(raw.shape[-2:])) if by_channel else (1, raw.shape[-1])


def _rate(xp: Namespace, A_log: Array, dtype: Any, by_channel: bool) -> Array:
    """e^{A_log}, broadcastable to raw."""
    return xp.exp(cast(xp, _by_head(A_log, by_channel), dtype))


def _by_head(A_log: Array, by_channel: bool) -> Array:
    return A_log[:, None] if by_channel else A_log


def _raw(xp: Namespace, raw: Array, bias: Array | None, dtype: Any) -> Array:
    raw = cast(xp, raw, dtype)
    return raw if bias is None else raw + cast(xp, bias, dtype)
