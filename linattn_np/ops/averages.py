"""Outputs divided by the sum of their weights: a column of ones among the values gives the denominator."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..runtime.arrays import Array, Namespace, cast, device, is_numpy, shared_heads
from ..runtime.memory import is_next_column
from .host import kernels, numpy_kernels


def with_ones(xp: Namespace, v: Array, dtype: Any = None, factor: Array | None = None) -> Array:
    """factor [v, 1]: (..., V) to (..., V + 1), in `dtype`, None: that of v; factor (..., 1), None: 1."""
    dtype = v.dtype if dtype is None else dtype
    if (cpu := kernels(xp, v, factor)) is not None:
        return cpu.compiled("appended", (v, None, None, factor), ((*v.shape[:-1], v.shape[-1] + 1), dtype), dtype)
    v = cast(xp, v, dtype)
    ones = xp.ones((*v.shape[:-1], 1), dtype=dtype, device=device(v))
    return xp.concat([v, ones] if factor is None else [factor * v, xp.broadcast_to(factor, ones.shape)], axis=-1)


def with_sums(xp: Namespace, S: Array, z: Array, dtype: Any, view: bool) -> Array:
    """[S, z] in `dtype`: (..., K, V) and (..., K) to (..., K, V + 1).

    view: whether NumPy arrays that lie so, as calls return them, are not copied.
    """
    if view and is_numpy(xp) and S.dtype == z.dtype == dtype and is_next_column(S, z):
        return np.lib.stride_tricks.as_strided(S, (*S.shape[:-1], S.shape[-1] + 1), S.strides)
    if (cpu := kernels(xp, S, z)) is not None:
        return cpu.compiled("appended", (S, z[..., None]), ((*S.shape[:-1], S.shape[-1] + 1), dtype), dtype)
    return xp.concat([cast(xp, S, dtype), cast(xp, z, dtype)[..., None]], axis=-1)


def divide(xp: Namespace, out: Array, eps: float) -> tuple[Array, Array]:
    """(numerators / sums, sums = denominator + eps): (..., V + 1) to (..., V) and (..., 1); 0 where sums is 0."""
    sums = out[..., -1:] + eps if eps else out[..., -1:]
    if (cpu := kernels(xp, out)) is not None:
        return cpu.compiled("quotient", (out,), (_of_numerators(out), out.dtype), out.dtype, eps), sums
    return quotient(xp, out[..., :-1], sums), sums


def divided_vjp(xp: Namespace, out: Array, eps: float, dout: Array, dtype: Any) -> Array:
    """d [num, den] (..., V + 1) in `dtype` from that of num / (den + eps), both from `out` = [num, den]."""
    if (cpu := numpy_kernels(xp, out, dout)) is not None:
        return cpu.compiled("quotient_vjp", (out, dout), (out.shape, dtype), dtype, eps)
    return divide_vjp(xp, *divide(xp, out, eps), cast(xp, dout, dtype))


def divide_by_most(xp: Namespace, out: Array, least: Array) -> Array:
    """Numerators over max(|denominator|, least): (..., heads, V + 1) to (..., heads, V); 0 where that is 0.

    least (..., H): heads of `out` share its heads in groups.
    """
    if (cpu := kernels(xp, out, least)) is not None and least.shape[-1]:
        groups = out.reshape((*least.shape, out.shape[-2] // least.shape[-1], out.shape[-1]))
        found = cpu.compiled(
            "quotient", (groups, least[..., None, None]), (_of_numerators(groups), out.dtype), out.dtype
        )
        return found.reshape(_of_numerators(out))
    return quotient(xp, out[..., :-1], most(xp, out[..., -1:], least)[0])


def divide_by_most_vjp(xp: Namespace, out: Array, least: Array, dout: Array, dtype: Any) -> Array:
    """d [num, den] (..., heads, V + 1) in `dtype`: dnum = dout / m, m = max(|den|, least); where |den| is the larger,
    dden = -sign(den) <dnum, num> / m.
    """
    if (cpu := kernels(xp, out, least, dout)) is not None and least.shape[-1]:
        groups = (*least.shape, out.shape[-2] // least.shape[-1])
        each = (out.reshape((*groups, out.shape[-1])), dout.reshape((*groups, dout.shape[-1])), least[..., None, None])
        return cpu.compiled("quotient_vjp", each, (each[0].shape, dtype), dtype).reshape(out.shape)
    num, den = out[..., :-1], out[..., -1:]
    denominator, is_den = most(xp, den, least)
    dnum = quotient(xp, cast(xp, dout, dtype), denominator)
    dden = quotient(xp, -xp.sign(den) * xp.sum(dnum * num, axis=-1, keepdims=True), denominator)
    return xp.concat([dnum, xp.where(is_den, dden, xp.zeros_like(dden))], axis=-1)


def most(xp: Namespace, denominators: Array, least: Array) -> tuple[Array, Array]:
    """(max(|denominator|, least), whether |denominator| is larger); groups of heads share `least` (..., H)."""
    size, least = xp.abs(denominators), shared_heads(xp, least[..., None], denominators.shape[-2])
    return xp.maximum(size, least), size > least


def _of_numerators(out: Array) -> tuple[int, ...]:
    return *out.shape[:-1], out.shape[-1] - 1


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
