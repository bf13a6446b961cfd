"""Outputs over the sum of their weights: values with a column of ones, whose output divides the others."""

from __future__ import annotations

import math

from ..ground.namespace import Array, Namespace, device


def with_ones(xp: Namespace, v: Array) -> Array:
    """[v, 1]: (..., V) to (..., V + 1)."""
    return xp.concat([v, xp.ones((*v.shape[:-1], 1), dtype=v.dtype, device=device(v))], axis=-1)


def divide(xp: Namespace, out: Array, eps: float) -> tuple[Array, Array]:
    """(numerators over denominator + eps, that): (..., V + 1) to (..., V) and (..., 1); 0 where no key answers."""
    sums = out[..., -1:] + eps
    return out[..., :-1] / _over(xp, sums), sums


def divide_vjp(xp: Namespace, average: Array, sums: Array, dout: Array) -> Array:
    """d numerators = dout / sums, d denominator = -<d numerators, average>, side by side: (..., V + 1)."""
    dnum = dout / _over(xp, sums)
    return xp.concat([dnum, -xp.sum(dnum * average, axis=-1, keepdims=True)], axis=-1)


def _over(xp: Namespace, sums: Array) -> Array:
    """inf for 0, so that what is divided by it is 0."""
    return xp.where(sums == 0, xp.full_like(sums, math.inf), sums)
