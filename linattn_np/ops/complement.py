"""Keys that are the forgotten share of a channel:   k = 1 - e^g,        dg += -e^g dk; and log(1 - s).

On NumPy and CuPy arrays each line is one kernel; that of CuPy stores the keys of bfloat16 calls in bfloat16.
"""

from __future__ import annotations

import math
from typing import Any

from ..runtime.arrays import Array, Namespace, cast, is_cupy
from .host import kernels


def complement(xp: Namespace, g: Array, dtype: Any, stored: Any = None) -> Array:
    """1 - e^g in `dtype`; stored: the dtype that kernels round it to, if they compute it."""
    if (kernel := _kernel(xp, dtype)) is not None and kernel.takes(g, stored or dtype):
        return kernel.complement(xp, g, stored or dtype)
    if (cpu := kernels(xp, g)) is not None:
        return cpu.compiled("complement", (g,), (g.shape, dtype), dtype)
    return -xp.expm1(cast(xp, g, dtype))


def complement_vjp(xp: Namespace, g: Array, dg: Array, dk: Array, dtype: Any) -> Array:
    """dg - e^g dk: the gradient of g, which decays and makes the keys."""
    if (kernel := _kernel(xp, dtype)) is not None and kernel.takes(g, dk.dtype, dg, dk):
        return kernel.complement_vjp(xp, g, dg, dk)
    if (cpu := kernels(xp, g, dg, dk)) is not None:
        return cpu.compiled("complement_vjp", (g, dg, dk), (g.shape, dtype), dtype)
    return dg - xp.exp(cast(xp, g, dtype)) * dk


def log_rest(xp: Namespace, s: Array, dtype: Any) -> Array:
    """log(1 - s) in `dtype`; -inf from s = 1 on."""
    if (cpu := kernels(xp, s)) is not None:
        return cpu.compiled("log_rest", (s,), (s.shape, dtype), dtype)
    s = cast(xp, s, dtype)
    some = s < 1
    return xp.where(some, xp.log1p(-xp.where(some, s, xp.zeros_like(s))), xp.full_like(s, -math.inf))


def log_rest_vjp(xp: Namespace, s: Array, ds: Array, dg: Array, dtype: Any) -> Array:
    """ds - dg / (1 - s), the gradient of s with that of log_rest(s); ds from s = 1 on."""
    if (cpu := kernels(xp, s, ds, dg)) is not None:
        return cpu.compiled("log_rest_vjp", (s, ds, dg), (s.shape, dtype), dtype)
    rest = 1 - cast(xp, s, dtype)
    empty = rest <= 0
    return ds - xp.where(empty, xp.zeros_like(rest), dg / xp.where(empty, xp.ones_like(rest), rest))


def _kernel(xp: Namespace, dtype: Any) -> Any:
    """The module of kernels, or None where they do not compute this dtype."""
    if not is_cupy(xp) or dtype != xp.float32:
        return None
    from .cuda import complement

    return complement
