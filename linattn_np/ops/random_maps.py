"""Feature maps with random directions, each with its transpose: FAVOR+ and random Fourier features.

The directions depend on (channels, features, seed) alone. They are rounded to float32, so that they are the same
numbers in every dtype.
"""

from __future__ import annotations

import math
from math import ceil, log
from typing import Any

import numpy as np

from ..runtime.arrays import Array, Namespace, constant, device, is_cupy
from ..runtime.constants import constant_array
from ..runtime.held import cached
from .host import kernels
from .rows import times


def favor_features(K: int) -> int:
    """K log K, rounded, as in Choromanski et al.; at least 2."""
    return max(2, round(K * log(max(K, 1))))


@cached
def directions(K: int, m: int, seed: int) -> np.ndarray:
    """(m, K): blocks of K orthogonal rows, with the norms of normal vectors: each row is normally distributed."""
    rng = np.random.default_rng(seed)
    if not K:
        return np.zeros((m, 0))
    rows = np.concatenate([_orthogonal(rng, K) for _ in range(ceil(m / K))], axis=0)[:m]
    length = np.sqrt(np.sum(rng.standard_normal((m, K)) ** 2, axis=1, keepdims=True))
    return (rows * length).astype(np.float32).astype(np.float64)


def _orthogonal(rng: np.random.Generator, K: int) -> np.ndarray:
    """Haar distributed: Q takes the signs of the diagonal of R."""
    Q, R = np.linalg.qr(rng.standard_normal((K, K)))
    return (Q * np.where(np.diag(R) < 0, -1.0, 1.0)).T


def _weights(xp: Namespace, x: Array, m: int, seed: int, factor: float) -> Array:
    """(K, m) directions as columns, in x's library and dtype."""
    if type(x) is np.ndarray:
        return weights_of_numpy(x.shape[-1], m, seed, factor, x.dtype)
    return constant(xp, directions(x.shape[-1], m, seed).T, x.dtype, device(x)) * factor


def _kernels(xp: Namespace, x: Array) -> Any:
    """The kernels of one token's features on CuPy arrays, which are launches; None of more: a matrix product."""
    return kernels(xp, x) if is_cupy(xp) and x.ndim > 2 and x.shape[-3] == 1 and x.size else None


def _columns(xp: Namespace, x: Array, m: int, seed: int, factor: float) -> Array:
    """The weights of CuPy's x, row by row, cached."""
    K, where = x.shape[-1], device(x)
    key = ("directions", K, m, seed, factor, str(x.dtype))
    make = lambda: xp.asarray(weights_of_numpy(K, m, seed, factor, np.dtype(x.dtype)).ravel(), device=where)  # noqa: E731
    return constant_array(xp, key, where, make)


@cached
def weights_of_numpy(K: int, m: int, seed: int, factor: float, dtype: np.dtype) -> np.ndarray:
    """(K, m) directions as columns, times a factor."""
    return np.ascontiguousarray(directions(K, m, seed).T, dtype) * dtype.type(factor)


def favor(xp: Namespace, x: Array, m: int, seed: int, hyperbolic: bool = False) -> Array:
    """e^{w_i . y - |y|^2 / 2} / sqrt(m), y = x K^{-1/4}; hyperbolic: m / 2 directions, each with +w and -w.

    The mean of phi(q) . phi(k) over seeds is e^{q . k / sqrt(K)}. No exponent exceeds |w_i|^2 / 2.
    """
    if type(x) is np.ndarray:
        out = np.empty((math.prod(x.shape[:-1]), m), x.dtype)
        favor_into(np.reshape(x, (len(out), x.shape[-1])), out, seed, hyperbolic)
        return out.reshape(*x.shape[:-1], m)
    factor = max(x.shape[-1], 1) ** -0.25
    if (cuda := _kernels(xp, x)) is not None:
        W = _columns(xp, x, m // 2 if hyperbolic else m, seed, factor)
        shape, less = (*x.shape[:-1], m), log(max(m, 1)) / 2
        return cuda.compiled("favor", (x, W), (shape, x.dtype), x.dtype, factor, less, hyperbolic)
    angle = times(xp, x, _weights(xp, x, m // 2 if hyperbolic else m, seed, factor))
    angle = xp.concat([angle, -angle], axis=-1) if hyperbolic else angle
    return xp.exp(angle - (xp.sum(x * x, axis=-1, keepdims=True) * (factor**2 / 2) + log(max(m, 1)) / 2))


def favor_into(x: np.ndarray, out: np.ndarray, seed: int, hyperbolic: bool) -> None:
    """favor for NumPy rows x (R, K), into out (R, m)."""
    m, factor = out.shape[-1], max(x.shape[-1], 1) ** -0.25
    half = np.einsum("rk,rk->r", x, x)[:, None] * x.dtype.type(factor**2 / 2) + x.dtype.type(log(max(m, 1)) / 2)
    W = _weights(np, x, m // 2 if hyperbolic else m, seed, factor)
    if hyperbolic:
        angle = times(np, x, W)
        np.subtract(angle, half, out=out[:, : m // 2])
        np.negative(angle + half, out=out[:, m // 2 :])
    else:
        np.subtract(times(np, x, W), half, out=out)
    np.exp(out, out=out)


def favor_vjp(
    xp: Namespace, x: Array, m: int, seed: int, hyperbolic: bool, dphi: Array, phi: Array | None = None
) -> Array:
    """d = phi (.) dphi;   dx = d W - (sum d) x.   phi: favor(x), if known."""
    factor = max(x.shape[-1], 1) ** -0.25
    W = _weights(xp, x, m // 2 if hyperbolic else m, seed, factor)
    d = dphi * (favor(xp, x, m, seed, hyperbolic) if phi is None else phi)
    both = d[..., : m // 2] - d[..., m // 2 :] if hyperbolic else d
    return times(xp, both, xp.matrix_transpose(W)) - xp.sum(d, axis=-1, keepdims=True) * (factor**2) * x


def fourier(xp: Namespace, x: Array, m: int, seed: int, sigma: float = 1.0) -> Array:
    """[sin(w_i . x / sigma), cos(w_i . x / sigma)] / sqrt(m): (..., K) to (..., 2 m).

    The mean of phi(q) . phi(k) over seeds is e^{-|q - k|^2 / (2 sigma^2)}.
    """
    if (cuda := _kernels(xp, x)) is not None:
        W, scale = _columns(xp, x, m, seed, 1 / sigma), max(m, 1) ** -0.5
        return cuda.compiled("fourier", (x, W), ((*x.shape[:-1], 2 * m), x.dtype), x.dtype, scale)
    angle = times(xp, x, _weights(xp, x, m, seed, 1 / sigma))
    return xp.concat([xp.sin(angle), xp.cos(angle)], axis=-1) * max(m, 1) ** -0.5


def fourier_vjp(
    xp: Namespace, x: Array, m: int, seed: int, sigma: float, dphi: Array, phi: Array | None = None
) -> Array:
    """d angle = d sin (.) cos - d cos (.) sin.   phi: fourier(x), if known."""
    phi = fourier(xp, x, m, seed, sigma) if phi is None else phi
    d = dphi[..., :m] * phi[..., m:] - dphi[..., m:] * phi[..., :m]
    return times(xp, d, xp.matrix_transpose(_weights(xp, x, m, seed, 1 / sigma)))


def kernels_of(steps: Any, *arrays: Array) -> Any:
    """The kernels that store features of CuPy's rows in bfloat16 (ops/cuda/features.py), or None."""
    from .cuda import features

    return features if features.takes(steps, *arrays) else None
