"""Feature maps whose inner products are polynomials of q . k, each with its transpose; and DPFP.

A monomial x_{i1} ... x_{ip}, i1 <= ... <= ip, occurs p! / prod(n_i!) times in (q . k)^p, n_i the multiplicity of i.
Features sqrt(p! / prod(n_i!)) x_{i1} ... x_{ip} therefore have the inner product (q . k)^p with each monomial once.
"""

from __future__ import annotations

import functools
from itertools import combinations_with_replacement
from math import factorial, prod
from typing import Any

import numpy as np

from ..runtime.arrays import Array, Namespace, constant, device, is_cupy
from ..runtime.constants import constant_array
from ..runtime.held import cached
from .host import kernels, numpy_kernels


def _monomials(K: int, p: int) -> tuple[list[int], list[int], list[float], list[int], list[float]]:
    """Degree p > 0 of K channels: (the monomial of degree p - 1 that each extends, by which channel, its weight;
    for channel i and monomial m of degree p - 1 the place of x_i m, and d(weight x_i m) / dx_i over m), flat.
    """
    if K == 0:
        return [], [], [], [], []
    lower = list(combinations_with_replacement(range(K), p - 1))
    here = list(combinations_with_replacement(range(K), p))
    place, below = {m: n for n, m in enumerate(here)}, {m: n for n, m in enumerate(lower)}
    weight = [(factorial(p) / prod(factorial(m.count(i)) for i in set(m))) ** 0.5 for m in here]
    joined = [(i, m, place[tuple(sorted((*m, i)))]) for i in range(K) for m in lower]
    return ([below[m[:-1]] for m in here], [m[-1] for m in here], weight, [n for _, _, n in joined],
            [weight[n] * (m.count(i) + 1) for i, m, n in joined])  # fmt: skip


@cached
def _tables(K: int, p: int) -> tuple[np.ndarray, ...]:
    parent, last, weight, joined, slope = _monomials(K, p)
    as_places = functools.partial(np.asarray, dtype=np.int64)
    return as_places(parent), as_places(last), np.asarray(weight), as_places(joined), np.asarray(slope)


def _own(xp: Namespace, y: np.ndarray, like: Array) -> Array:
    """A table in the caller's library, numbers in the dtype of `like`."""
    return constant(xp, y, xp.int32 if y.dtype == np.int64 else like.dtype, device(like))


def _raw(xp: Namespace, x: Array, degree: int) -> list[Array]:
    """Monomials of every degree up to `degree` without weights; each is its parent times one channel."""
    levels = [xp.ones_like(x[..., :1] if x.shape[-1] else xp.sum(x, axis=-1, keepdims=True))]
    for p in range(1, degree + 1):
        parent, last, *_ = _tables(x.shape[-1], p)
        levels.append(xp.take(levels[-1], _own(xp, parent, x), axis=-1) * xp.take(x, _own(xp, last, x), axis=-1))
    return levels


def powers(xp: Namespace, x: Array, coefficients: tuple[float, ...], factor: float = 1.0) -> Array:
    """Features of factor x with phi(q) . phi(k) = sum_p c_p (q . k)^p, c_p >= 0; degrees with c_p = 0 are omitted."""
    few = is_cupy(xp) and x.size and len(coefficients) <= 3
    if few and (cuda := kernels(xp, x)) is not None:
        tables = [_on_device(xp, x, coefficients, n) for n in range(3)]
        return cuda.compiled("monomials", (x, *tables), ((*x.shape[:-1], len(tables[0])), x.dtype), x.dtype, factor)
    x = x * factor
    raw = _raw(xp, x, len(coefficients) - 1)
    parts = []
    for p, c in enumerate(coefficients):
        if c:
            weight = _tables(x.shape[-1], p)[2] if p else np.ones(1)
            parts.append(raw[p] * _own(xp, c**0.5 * weight, x))
    return xp.concat(parts, axis=-1)


def _on_device(xp: Namespace, x: Array, coefficients: tuple[float, ...], n: int) -> Array:
    """A row of _products_of_two in the dtype of CuPy's x, cached."""
    K, where = x.shape[-1], device(x)
    make = lambda: xp.asarray(_products_of_two(K, coefficients)[n].astype(np.dtype(x.dtype)), device=where)  # noqa: E731
    return constant_array(xp, ("monomials", n, K, coefficients, str(x.dtype)), where, make)


@cached
def _products_of_two(K: int, coefficients: tuple[float, ...]) -> np.ndarray:
    """(weights, first and second channels, -1 for none) of the monomials of degrees up to 2: (3, M)."""
    rows = []
    for p, c in enumerate(coefficients):
        if c and p < 2:
            channels = [(-1, -1)] if p == 0 else [(i, -1) for i in range(K)]
            rows += [(c**0.5, *pair) for pair in channels]
        elif c:
            pairs = combinations_with_replacement(range(K), 2)
            rows += [(c**0.5 * w, *pair) for w, pair in zip(_tables(K, 2)[2], pairs, strict=True)]
    return np.asarray(rows).reshape(-1, 3).T


def powers_vjp(xp: Namespace, x: Array, coefficients: tuple[float, ...], dphi: Array, factor: float = 1.0) -> Array:
    """dx_i = sum over degrees and monomials m of degree p - 1 of dphi(x_i m) d(x_i m) / dx_i, of factor x."""
    if is_cupy(xp) and x.size and len(coefficients) <= 3 and (cuda := kernels(xp, x, dphi)) is not None:
        _, c_1, c_2 = (*coefficients, 0.0, 0.0)[:3]
        given = sum(1 << p for p, c in enumerate(coefficients) if c)
        numbers = factor * c_1**0.5, factor**2 * c_2**0.5
        return cuda.compiled("monomials_vjp", (x, dphi), (x.shape, x.dtype), x.dtype, *numbers, given)
    x = x if factor == 1 else x * factor
    dx = _powers_vjp(xp, x, coefficients, dphi)
    return dx if factor == 1 else dx * factor


def _powers_vjp(xp: Namespace, x: Array, coefficients: tuple[float, ...], dphi: Array) -> Array:
    K, dx, at = x.shape[-1], xp.zeros_like(x), 0
    raw = _raw(xp, x, len(coefficients) - 2)
    for p, c in enumerate(coefficients):
        if not c:
            continue
        n = len(_tables(K, p)[1]) if p else 1
        d = dphi[..., at : at + n]
        at += n
        if p and K:
            joined, slope = _tables(K, p)[3:]
            d = xp.take(d, _own(xp, joined, x), axis=-1) * _own(xp, c**0.5 * slope, x)
            d = xp.reshape(d, (*x.shape[:-1], K, raw[p - 1].shape[-1]))
            dx = dx + xp.sum(d * raw[p - 1][..., None, :], axis=-1)
    return dx


# for NumPy: on a transposed block, rows are long and all monomials with one parent are one product


def powers_of_rows(x: np.ndarray, coefficients: tuple[float, ...]) -> np.ndarray:
    """`powers` of (R, K), as a transposed view of (M, R)."""
    raw = _levels(x, len(coefficients) - 1)
    out = np.empty((powers_width(x.shape[-1], coefficients), x.shape[0]), x.dtype)
    at = 0
    for p, c in enumerate(coefficients):
        if c:
            rows = out[at : at + len(raw[p])]
            np.multiply(raw[p], _weight(x, p, c), out=rows)
            at += len(rows)
    return out.T


def _weight(x: np.ndarray, p: int, c: float) -> np.ndarray:
    """The weights of the monomials of degree p, as a column."""
    weight = _tables(x.shape[-1], p)[2] if p else np.ones(1)
    return (c**0.5 * weight).astype(x.dtype)[:, None]


def _levels(x: np.ndarray, degree: int) -> list[np.ndarray]:
    """Monomials of every degree without weights, (M_p, R) each."""
    rows, K = np.ascontiguousarray(x.T), x.shape[-1]
    raw = [np.ones((1, x.shape[0]), x.dtype)]
    for p in range(1, degree + 1):
        level, at = np.empty((len(_tables(K, p)[1]), x.shape[0]), x.dtype), 0
        for below, last in enumerate(_lasts(K, p - 1)):
            np.multiply(raw[-1][below], rows[last:], out=level[at : at + K - last])
            at += K - last
        raw.append(level)
    return raw


def _lasts(K: int, p: int) -> list[int]:
    """The last channel of every monomial of degree p; its children append that channel or a later one."""
    return _tables(K, p)[1].tolist() if p else [0]


def powers_of_rows_vjp(x: np.ndarray, coefficients: tuple[float, ...], dphi: np.ndarray) -> np.ndarray:
    """Degrees from the highest down: each product passes its gradient to its parent and to its channel."""
    K, R = x.shape[-1], x.shape[0]
    if R == 1:  # a sum over one column has another summation order
        return powers_of_rows_vjp(np.repeat(x, 2, axis=0), coefficients, np.repeat(dphi, 2, axis=0))[:1]
    raw, rows = _levels(x, len(coefficients) - 1), np.ascontiguousarray(x.T)
    dx, raw_gradients, end = np.zeros((K, R), x.dtype), np.ascontiguousarray(dphi.T), dphi.shape[-1]
    dlevel: Any = 0.0
    for p in range(len(coefficients) - 1, 0, -1):
        if coefficients[p]:
            end -= len(raw[p])
            dlevel = dlevel + raw_gradients[end : end + len(raw[p])] * _weight(x, p, coefficients[p])
        below, at = np.zeros_like(raw[p - 1]), 0
        for n, last in enumerate(_lasts(K, p - 1)):
            d = dlevel[at : at + K - last]
            np.sum(d * rows[last:], axis=0, out=below[n])
            dx[last:] += d * raw[p - 1][n]
            at += K - last
        dlevel = below
    return dx.T


def powers_width(K: int, coefficients: tuple[float, ...]) -> int:
    """The number of features."""
    return sum((len(_tables(K, p)[1]) if p else 1) for p, c in enumerate(coefficients) if c)


def segments(K: int, coefficients: tuple[float, ...]) -> tuple[np.ndarray, np.ndarray]:
    """(weights (M,), (S, 3)): monomials of every degree as products of a parent's feature, a channel and a weight.

    A segment (parent, first channel, first feature): the parent's children with that channel and those after it. The
    weight is a feature's factor over its parent's; degrees below the first nonzero c_p are unweighted monomials.
    """
    factors, rows, at, begin = [np.array([max(coefficients[0], 0) ** 0.5 or 1.0])], [], 1, 0
    weights = [factors[0]]
    for p in range(1, len(coefficients)):
        parent, last, weight, *_ = _tables(K, p)
        factor = coefficients[p] ** 0.5 * weight if coefficients[p] else np.ones(len(weight))
        weights.append(factor / factors[-1][parent])
        factors.append(factor)
        for n, channel in enumerate(_lasts(K, p - 1)):
            rows.append((begin + n, channel, at))
            at += K - channel
        begin = at - len(last)
    return np.concatenate(weights), np.array(rows, np.int64).reshape(-1, 3)


def polynomial(z: Array, coefficients: tuple[float, ...]) -> Array:
    """sum_p c_p z^p, by Horner's rule."""
    y: Any = coefficients[-1]
    for c in coefficients[-2::-1]:
        y = y * z + c if c else y * z
    return y


def slope(coefficients: tuple[float, ...]) -> tuple[float, ...]:
    """The coefficients of the derivative."""
    return tuple(p * c for p, c in enumerate(coefficients))[1:]


def taylor_coefficients(order: int) -> tuple[float, ...]:
    """1, 1, 1/2, ..., 1/order!: the Taylor polynomial of exp."""
    return tuple(1 / factorial(p) for p in range(order + 1))


def dpfp(xp: Namespace, x: Array, nu: int) -> Array:
    """r (.) roll(r, j) for j = 1 .. nu, r = [relu(x), relu(-x)]: (..., K) to (..., 2 K nu)."""
    if (cpu := kernels(xp, x)) is not None:
        return cpu.compiled("dpfp", (x,), ((*x.shape[:-1], 2 * nu * x.shape[-1]), x.dtype), x.dtype, how=nu)
    r = _halves(xp, x)
    return xp.concat([r * xp.roll(r, j, axis=-1) for j in range(1, nu + 1)], axis=-1)


def dpfp_vjp(xp: Namespace, x: Array, nu: int, dphi: Array) -> Array:
    """Product rule for r (.) roll(r, j)."""
    if (cpu := numpy_kernels(xp, x, dphi)) is not None and x.dtype == dphi.dtype:
        return cpu.compiled("dpfp_vjp", (x, dphi), (x.shape, x.dtype), x.dtype, how=nu)
    r, K = _halves(xp, x), x.shape[-1]
    dr = xp.zeros_like(r)
    for j in range(1, nu + 1):
        d = dphi[..., 2 * K * (j - 1) : 2 * K * j]
        dr = dr + d * xp.roll(r, j, axis=-1) + xp.roll(d * r, -j, axis=-1)
    zero = xp.zeros_like(x)
    return xp.where(x > 0, dr[..., :K], zero) - xp.where(x < 0, dr[..., K:], zero)


def _halves(xp: Any, x: Array) -> Array:
    zero = xp.zeros_like(x)
    return xp.concat([xp.where(x > 0, x, zero), xp.where(x < 0, -x, zero)], axis=-1)
