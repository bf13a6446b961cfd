"""Mamba-2's step size, skip connection and output gate, each with its transpose.

    step_size      dt <- min(max(dt + bias, or softplus of it, low), high)
    skip_and_gate  out <- (out + D x) silu(z)

On NumPy arrays each line is a kernel. On CuPy arrays kernels compute more at once (cuda/step_size.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..runtime.arrays import Array, Namespace, cast, is_numpy
from .clip import clip, clip_vjp
from .gates import silu, silu_vjp, softplus, softplus_vjp
from .host import kernels

Limits = tuple[float, float]


def step_size(xp: Namespace, dt: Array, bias: Array | None, soft: bool, limits: Limits, dtype: Any) -> Array:
    """The step sizes in `dtype`, of dt (..., T, H) and bias (H,)."""
    if (cpu := kernels(xp, dt, bias)) is not None:
        return cpu.compiled("step_size", (dt, bias), (dt.shape, dtype), dtype, *limits, soft)
    return clip(xp, _soft(xp, dt, bias, soft, dtype)[1], limits)


def step_size_vjp(xp: Namespace, dt: Array, bias: Array | None, soft: bool, limits: Limits, d: Array) -> Array:
    """The gradient of dt, and of bias before its sum over tokens, in the dtype of d: 0 outside the limits."""
    if (cpu := kernels(xp, dt, bias, d)) is not None:
        return cpu.compiled("step_size_vjp", (dt, bias, d), (d.shape, d.dtype), d.dtype, *limits, soft)
    raw, step = _soft(xp, dt, bias, soft, d.dtype)
    d = clip_vjp(xp, step, limits, d)
    return softplus_vjp(xp, raw, d) if soft else d


def _soft(xp: Namespace, dt: Array, bias: Array | None, soft: bool, dtype: Any) -> tuple[Array, Array]:
    """(dt + bias, the step sizes before their limits)."""
    raw = cast(xp, dt, dtype)
    raw = raw if bias is None else raw + cast(xp, bias, dtype)
    return raw, softplus(xp, raw) if soft else raw


def skip_and_gate(xp: Namespace, out: Array, D: Array | None, x: Array | None, z: Array | None, dtype: Any) -> Array:
    """(out + D x) silu(z) in `dtype`; D (H, 1) or (H, V), without it `out` alone; z None: no gate."""
    x = None if D is None else x
    if (cpu := kernels(xp, out, D, x, z)) is not None:
        return cpu.compiled("skip_and_gate", (out, D, x, z), (out.shape, dtype), dtype)
    y = cast(xp, out, dtype)
    y = y if D is None else y + cast(xp, D, dtype) * cast(xp, x, dtype)
    return y if z is None else y * silu(xp, cast(xp, z, dtype))


def gate_vjp(xp: Namespace, y: Array, z: Array, dout: Array, dtype: Any) -> Array:
    """The gradient of z of y silu(z), in `dtype`; of NumPy arrays in that of z, if each z gates one y."""
    if (cpu := kernels(xp, y, z, dout)) is not None:
        shape = np.broadcast_shapes(y.shape, z.shape)
        stored = z.dtype if is_numpy(xp) and shape == z.shape else dtype
        return cpu.compiled("gate_vjp", (y, dout, z), (shape, stored), dtype)
    return silu_vjp(xp, cast(xp, z, dtype), cast(xp, dout, dtype) * cast(xp, y, dtype))
