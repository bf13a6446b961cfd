"""Outputs divided by the sum of their weights: a column of ones among the values gives the denominator."""

from __future__ import annotations

import math

from ..runtime.arrays import Array, Namespace, device


def with_ones(xp: Namespace, v: Array) -> Array:
    """[v, 1]: (..., V) to (..., V + 1)."""
    return xp.concat([v, xp.ones((*v.shape[:-1], 1), dtype=v.dtype, device=device(v))], axis=-1)


def divide(xp: Namespace, out: Array, eps: float) -> tuple[Array, Array]:
    """(numerators / sums, sums = denominator + eps): (..., V + 1) to (..., V) and (..., 1); 0 where sums is 0."""
    sums = out[..., -1:] + eps
    return quotient(xp, out[..., :-1], sums), sums


def quotient(xp: Namespace, numerators: Array, sums: Array) -> Array:
    """numerators / sums; 0 where sums is 0."""
    return numerators / _over(xp, sums)


def divide_vjp(xp: Namespace, average: Array, sums: Array, dout: Array) -> Array:
    """d numerators = dout / sums, d denominator = -<d numerators, average>, concatenated: (..., V + 1)."""
    dnum = dout / _over(xp, sums)
    return xp.concat([dnum, -xp.sum(dnum * average, axis=-1, keepdims=True)], axis=-1)


def _over(xp: Namespace, sums: Array) -> Array:
    """sums with inf for 0, so that quotients become 0."""
    return xp.where(sums == 0, xp.full_like(sums, math.inf), sums)
