"""A log decay from its raw projection, as in Mamba-2:   g = -e^{A_log} softplus(a),   a = raw + bias.

    da = -e^{A_log} sigmoid(a) dg,        dbias = sum over tokens of da,       dA_log = sum of g dg

raw (..., T, H), or (..., T, H, K) with A_log (H,). On float32 CuPy arrays each line is one kernel.
"""

from __future__ import annotations

from math import prod
from typing import Any

from ..runtime.arrays import Array, Namespace, cast, is_cupy, sum_to
from .gates import sigmoid, softplus


def log_decay(xp: Namespace, raw: Array, A_log: Array, bias: Array | None, dtype: Any, by_channel: bool) -> Array:
    """g, in `dtype`; by_channel: raw has an axis of channels."""
    if (kernel := _kernel(xp, raw, dtype)) is not None:
        return kernel.log_decay(xp, raw, A_log, bias, raw.shape[-1] if by_channel else 1)
    return -_rate(xp, A_log, dtype, by_channel) * softplus(xp, _raw(xp, raw, bias, dtype))


def log_decay_vjp(
    xp: Namespace, raw: Array, A_log: Array, bias: Array | None, dg: Array, by_channel: bool
) -> tuple[Array, Array, Array | None]:
    """Gradients of raw, A_log and bias; dg in the dtype of the computation."""
    if (kernel := _kernel(xp, raw, dg.dtype)) is not None:
        return kernel.log_decay_vjp(xp, raw, A_log, bias, dg, raw.shape[-1] if by_channel else 1)
    rate, a = _rate(xp, A_log, dg.dtype, by_channel), _raw(xp, raw, bias, dg.dtype)
    da, g = -rate * sigmoid(xp, a) * dg, -rate * softplus(xp, a)
    product = dg * xp.where(xp.isinf(g), xp.zeros_like(g), g)  # a reset has no gradient
    dA = sum_to(xp, xp.sum(product, axis=-1) if by_channel else product, tuple(A_log.shape))
    return da, dA, None if bias is None else sum_to(xp, da, tuple(bias.shape))


def _kernel(xp: Namespace, raw: Array, dtype: Any) -> Any:
    """The module of kernels that supports the call, or None."""
    if not is_cupy(xp) or dtype != xp.float32 or not prod(raw.shape):
        return None
    from .cuda import gate_formula

    return gate_formula if gate_formula.takes(raw) else None


def _rate(xp: Namespace, A_log: Array, dtype: Any, by_channel: bool) -> Array:
    """e^{A_log}, broadcastable to raw."""
    rate = xp.exp(cast(xp, A_log, dtype))
    return rate[:, None] if by_channel else rate


def _raw(xp: Namespace, raw: Array, bias: Array | None, dtype: Any) -> Array:
    raw = cast(xp, raw, dtype)
    return raw if bias is None else raw + cast(xp, bias, dtype)
