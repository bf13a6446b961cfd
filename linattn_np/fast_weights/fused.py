"""The kernels of what lies between the products of a learner, and the products themselves, where arrays are CuPy's."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from ..ops.product import matmul as matmul
from ..runtime.arrays import Array, Namespace, device, is_cupy

FEW = 8  # arrays that CuPy joins by a copy of each


def fused_of(xp: Namespace, *arrays: Any) -> Any:
    """The kernels (cuda/between.py) for these arrays, None among them; None where array calls compute."""
    if not is_cupy(xp):
        return None
    from .cuda import between

    return between if between.takes(*arrays) else None


def combined(xp: Namespace, x: Any, factors: Any, a: float = 1.0, b: float = 1.0) -> Array:
    """a c_0 x_0 + b c_1 x_1 + c_2 x_2, up to three arrays of one shape; c_n (..., 1, 1), None: 1."""
    alike = all(y.shape == x[0].shape for y in x)
    given = [c for c in factors if c is not None]
    of_matrices = alike and all(c.shape[-2:] == (1, 1) and c.ndim <= x[0].ndim for c in given)
    if of_matrices and (fused := fused_of(xp, *x, *given)) is not None:
        return fused.combined(x, factors, a, b)
    total = None
    for y, c, n in zip(x, factors, (a, b, 1.0), strict=False):
        y = y if c is None else c * y
        if n == -1 and total is not None:
            total = total - y
            continue
        y = y if n == 1 else n * y
        total = y if total is None else total + y
    return total


def added_product(xp: Namespace, y: Array, x: Array, W: Array) -> Array:
    """y + x W; of CuPy arrays in the memory of y, to which no other reference may exist."""
    if not is_cupy(xp) or y.dtype != W.dtype or not y.flags.c_contiguous:
        return y + matmul(xp, x, W)
    from ..runtime.cuda.products import batched

    return batched(x, W, y)


def more_product(xp: Namespace, y: Any, x: Array, W: Array) -> Array:
    """y + x W, as `added_product`; no y: 0."""
    return matmul(xp, x, W) if y is None else added_product(xp, y, x, W)


def stacked(xp: Namespace, each: list[Array], axis: int = 0) -> Array:
    """Arrays of one shape along a new axis; CuPy's own would copy their addresses from the host."""
    if not is_cupy(xp):
        return xp.stack(each, axis=axis)
    if axis:
        return xp.moveaxis(stacked(xp, each), 0, axis)
    from ..ops.cuda import join

    shape = (len(each), *each[0].shape)
    if each[0].size and join.takes(each):
        return xp.reshape(join.joined(each), shape)
    whole = xp.empty(shape, dtype=each[0].dtype, device=device(each[0]))
    for n, y in enumerate(each):
        whole[n] = y
    return whole


def appended(xp: Namespace, each: Sequence[Array]) -> Array:
    """Tokens (..., n, D) one after the other; CuPy's own would copy the addresses of more than `FEW` from the host."""
    if len(each) == 1:
        return each[0]
    if is_cupy(xp) and len(each) > FEW:
        runs = [list(own) for _, own in groupby(each, lambda y: y.shape)]
        if len(runs) > FEW:
            return appended(xp, [appended(xp, each[n : n + FEW]) for n in range(0, len(each), FEW)])
        each = [own[0] if len(own) == 1 else _side_by_side(xp, stacked(xp, own)) for own in runs]
    return each[0] if len(each) == 1 else xp.concat(list(each), axis=-2)


def _side_by_side(xp: Namespace, y: Array) -> Array:
    """(count, ..., n, D) as (..., count n, D)."""
    count, *lead, n, D = y.shape
    axes = (*range(1, y.ndim - 2), 0, y.ndim - 2, y.ndim - 1)
    return xp.reshape(xp.permute_dims(y, axes), (*lead, count * n, D))
