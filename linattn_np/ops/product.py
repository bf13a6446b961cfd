"""Products and multiples of arrays, number by number; on NumPy arrays each is one kernel."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ..runtime.arrays import Array, Namespace, cast, is_cupy, shared_heads
from .gates import EXP, exponential
from .host import kernels, numpy_kernels


def product(xp: Namespace, *factors: Array, dtype: Any) -> Array:
    """x y ... of arrays that are broadcast, in `dtype`."""
    if 1 < len(factors) <= 3 and (cpu := kernels(xp, *factors)) is not None:
        shape = np.broadcast_shapes(*(x.shape for x in factors))
        return cpu.compiled("product", factors, (shape, dtype), dtype)
    return functools.reduce(lambda x, y: x * y, (cast(xp, x, dtype) for x in factors))


def product_of_heads(xp: Namespace, *factors: Array, dtype: Any) -> Array:
    """The product of arrays (..., heads, D) in `dtype`; an array of fewer heads has one for each group of another's."""
    counts = {x.shape[-2] for x in factors}
    heads, few = max(counts), min(counts)
    if len(counts) > 2 or (few != heads and kernels(xp, *factors) is None):
        return product(xp, *(shared_heads(xp, x, heads) for x in factors), dtype=dtype)
    if few == heads or not few:
        return product(xp, *factors, dtype=dtype)
    y = product(xp, *(x.reshape((*x.shape[:-2], few, x.shape[-2] // few, x.shape[-1])) for x in factors), dtype=dtype)
    return y.reshape((*y.shape[:-3], heads, y.shape[-1]))


def decayed(xp: Namespace, x: Array, g: Array, dtype: Any) -> Array:
    """x e^g in the dtype of x, computed in `dtype`; g is broadcast."""
    if (cpu := kernels(xp, x, g)) is not None and is_cupy(xp):
        return cpu.compiled("feature_vjp", (g, x), (x.shape, x.dtype), dtype, how=EXP)
    return product(xp, x, exponential(xp, g, dtype), dtype=x.dtype)


def rest(xp: Namespace, x: Array, y: Array, dtype: Any) -> Array:
    """1 - x y of arrays that are broadcast, in `dtype`."""
    if (cpu := numpy_kernels(xp, x, y)) is not None:
        one = cpu.constant_of(1.0, dtype)
        less = cpu.compiled("scaled", (y,), (y.shape, dtype), dtype, -1.0)
        return cpu.compiled("skip_and_gate", (one, x, less), (np.broadcast_shapes(x.shape, y.shape), dtype), dtype)
    return 1 - cast(xp, x, dtype) * cast(xp, y, dtype)


def multiple(xp: Namespace, a: float, x: Array, dtype: Any) -> Array:
    """a x in `dtype`."""
    if (cpu := kernels(xp, x)) is not None:
        return cpu.compiled("scaled", (x,), (x.shape, dtype), dtype, a)
    return a * cast(xp, x, dtype)


def matmul(xp: Namespace, x: Array, y: Array) -> Array:
    """x y of matrices with any axes in front; on CuPy arrays by cuBLAS, transposed matrices as they lie."""
    if not is_cupy(xp):
        return xp.matmul(x, y)
    from ..runtime.cuda.products import batched

    return batched(x, y)
