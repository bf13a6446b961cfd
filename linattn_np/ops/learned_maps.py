"""Feature maps of a learned projection y = x W + b, with gradients of W and b too: T2R and Hedgehog.

T2R       phi = relu(y)                          Kasai et al., arXiv 2103.13076
Hedgehog  phi = [softmax(y), softmax(-y)]        Zhang et al., arXiv 2402.04347; over the features, not the tokens
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..runtime.arrays import Array, Namespace, cast, compute_dtype, is_cupy
from .host import kernels
from .rows import times, times_vjp
from .sums import difference


def project(xp: Namespace, x: Array, W: Array, b: Array | None) -> Array:
    """x W + b: (..., K), (K, M), (M,) to (..., M)."""
    y = times(xp, x, W)
    return y if b is None else y + b


def project_vjp(xp: Namespace, x: Array, W: Array, dy: Array) -> tuple[Array, Array, Array]:
    """(dx, dW, db)."""
    dx, dW = times_vjp(xp, x, W, dy)
    return dx, dW, xp.sum(xp.reshape(dy, (-1, dy.shape[-1])), axis=0)


def softmax(xp: Namespace, y: Array) -> Array:
    """e^y over its sum along the last axis, which may be empty."""
    if not y.shape[-1]:
        return y
    if (cpu := kernels(xp, y)) is not None:
        dtype = compute_dtype(xp, y)
        return cpu.compiled("softmax", (y,), (y.shape, dtype), dtype)
    e = xp.exp(y - xp.max(y, axis=-1, keepdims=True))
    return e / xp.sum(e, axis=-1, keepdims=True)


def softmax_vjp(xp: Namespace, p: Array, dp: Array, out: Any = None) -> Array:
    """dy = p (.) (dp - <p, dp>), from the result p, in `out`; None: in the dtype of the computation."""
    dtype = compute_dtype(xp, p, dp)
    out = dtype if out is None else out
    if (cpu := kernels(xp, p, dp)) is not None and p.shape == dp.shape:
        return cpu.compiled("softmax_vjp", (p, dp), (p.shape, out), dtype)
    p, dp = cast(xp, p, dtype), cast(xp, dp, dtype)
    return cast(xp, p * (dp - xp.sum(p * dp, axis=-1, keepdims=True)), out)


def softmax_pair(xp: Namespace, y: Array) -> Array:
    """[softmax(y), softmax(-y)]: (..., M) to (..., 2 M)."""
    if (cpu := kernels(xp, y)) is not None:
        dtype, M = compute_dtype(xp, y), y.shape[-1]
        out = cpu.working((*y.shape[:-1], 2 * M), np.dtype(dtype))
        for n in range(2):
            cpu.compiled("softmax", (y,), out[..., n * M : (n + 1) * M], dtype, how=n)
        return out
    return xp.concat([softmax(xp, y), softmax(xp, -y)], axis=-1)


def softmax_pair_vjp(xp: Namespace, y: Array, dphi: Array) -> Array:
    M = y.shape[-1]
    if not is_cupy(xp) and M and (cpu := kernels(xp, y, dphi)) is not None:
        dtype = compute_dtype(xp, y, dphi)
        how = (y.shape, np.dtype(dtype)), dtype
        p = [cpu.compiled("softmax", (y,), *how, how=n) for n in range(2)]
        dy, less = (cpu.compiled("softmax_vjp", (p[n], dphi[..., n * M : (n + 1) * M]), *how) for n in range(2))
        return difference(xp, dy, less)
    return softmax_vjp(xp, softmax(xp, y), dphi[..., :M]) - softmax_vjp(xp, softmax(xp, -y), dphi[..., M:])
