"""Strengths of a delta rule that solves its differential equation over a step beta, s = |k|^2, and their transposes.

    exact flow     b = (1 - e^{-beta s}) / s = beta f(beta s), f(x) = (1 - e^{-x}) / x;    db/dbeta = e^{-x},
                   db/ds = beta^2 f'(x)                                                    (efla)
    implicit step  b = beta / (1 + beta s);  db/dbeta = 1 / (1 + beta s)^2,  db/ds = -b^2  (longhorn)

ds/dk = 2 k. k (..., T, Hk, K), beta (..., T, H): heads of beta share a key in groups. On NumPy arrays b is a kernel.
"""

from __future__ import annotations

from math import factorial
from typing import Any

from ..runtime.arrays import Array, Namespace, cast, shared_heads
from .host import kernels
from .product import product
from .sums import over_rows, sum_of_groups

NEAR = 0.1  # below, f' is its Taylor series to this power, above a difference that loses one digit
SERIES = [(-1) ** n * n / factorial(n + 1) for n in range(1, 12)]


def flow(xp: Namespace, x: Array) -> Array:
    """f(x) = (1 - e^{-x}) / x, f(0) = 1."""
    safe = xp.where(x == 0, xp.ones_like(x), x)
    return xp.where(x == 0, xp.ones_like(x), -xp.expm1(-safe) / safe)


def flow_slope(xp: Namespace, x: Array) -> Array:
    """f'(x) = (e^{-x} - f(x)) / x, f'(0) = -1/2."""
    near, series = xp.abs(x) < NEAR, xp.zeros_like(x)
    for term in reversed(SERIES):
        series = term + xp.where(near, x, 0 * series) * series
    safe = xp.where(near, xp.ones_like(x), x)
    return xp.where(near, series, (xp.exp(-safe) - flow(xp, safe)) / safe)


def strength(xp: Namespace, k: Array, beta: Array, implicit: bool, dtype: Any) -> Array:
    """b (..., T, H, 1) in `dtype`."""
    (*lead, few, _), heads = k.shape, beta.shape[-1]
    if (cpu := kernels(xp, k, beta)) is not None and few:
        groups = beta.reshape(*lead, few, heads // few, 1)
        b = cpu.compiled("strength", (k[..., None, :], groups), (groups.shape, dtype), dtype, how=implicit)
        return b.reshape(*lead, heads, 1)
    _, beta, x = _rates(xp, k, beta, dtype)
    return beta / (1 + x) if implicit else beta * flow(xp, x)


def strength_vjp(xp: Namespace, k: Array, beta: Array, implicit: bool, db: Array) -> tuple[Array, Array]:
    """(dk, dbeta) in the dtype of db (..., T, H, 1)."""
    (*lead, few, _), heads = k.shape, beta.shape[-1]
    if (cpu := kernels(xp, k, beta, db)) is not None and few:
        each = (k[..., None, :], beta.reshape(*lead, few, heads // few, 1), db.reshape(*lead, few, heads // few, 1))
        dbeta, ds = cpu.both("strength_vjp", each, (each[1].shape, db.dtype), db.dtype, how=int(implicit))
        ds = over_rows(xp, ds)
        return product(xp, ds, k, dtype=db.dtype), dbeta.reshape(*lead, heads)
    k, beta, x = _rates(xp, k, beta, db.dtype)
    if implicit:
        dbeta, ds = db / (1 + x) ** 2, -db * (beta / (1 + x)) ** 2
    else:
        dbeta, ds = db * xp.exp(-x), db * beta**2 * flow_slope(xp, x)
    return 2 * sum_of_groups(xp, ds, k.shape[-2]) * k, dbeta[..., 0]


def _rates(xp: Namespace, k: Array, beta: Array, dtype: Any) -> tuple[Array, Array, Array]:
    """(k, beta, beta s); the last two (..., T, H, 1)."""
    k, beta = cast(xp, k, dtype), cast(xp, beta, dtype)[..., None]
    return k, beta, beta * shared_heads(xp, xp.sum(k * k, axis=-1, keepdims=True), beta.shape[-2])
