"""Symmetric systems x A = b, one per row: solved exactly, or by conjugate gradients with A given as a function."""

from __future__ import annotations

import math
from collections.abc import Callable

import array_api_compat as compat
import numpy as np

from ..runtime.arrays import Array, Namespace, is_numpy


def conjugate_gradients(
    xp: Namespace, times_A: Callable[[Array], Array], b: Array, iterations: int, tolerance: float
) -> Array:
    """x with x A = b in every row of b (..., K), A symmetric and positive definite.

    From x = 0. A row stops when its residual r = b - x A has |r|^2 <= square_of(tolerance) |b|^2, all rows after
    `iterations`; the result of a row does not depend on the others.
    """
    x, r, p = xp.zeros_like(b), b, b
    rr = _dot(xp, r, r)
    enough = square_of(tolerance, float(xp.finfo(b.dtype).eps)) * rr
    for _ in range(iterations):
        going = ~(rr <= enough)  # a NaN row continues and stays NaN
        if is_numpy(xp) and not going.any():
            break
        pA = times_A(p)
        step = xp.where(going, _over(xp, rr, _dot(xp, p, pA)), xp.zeros_like(rr))
        x, r = x + step * p, r - step * pA
        before, rr = rr, _dot(xp, r, r)
        p = r + _over(xp, rr, before) * p
    return x


def square_of(tolerance: float, eps: float) -> float:
    """tolerance^2, at least eps^2: smaller residuals are rounding errors, and further steps increase the error."""
    return max(tolerance, eps) ** 2


def _dot(xp: Namespace, x: Array, y: Array) -> Array:
    """<x, y> of every row: (..., K) -> (..., 1)."""
    return xp.sum(x * y, axis=-1, keepdims=True)


def _over(xp: Namespace, x: Array, y: Array) -> Array:
    """x / y, x where y is 0."""
    return x / xp.where(y == 0, xp.ones_like(y), y)


def solve_rows(xp: Namespace, A: Array, b: Array) -> Array:
    """x with x A = b.   A (..., K, K), b (..., K)."""
    lead = np.broadcast_shapes(A.shape[:-2], b.shape[:-1])  # CuPy does not broadcast here
    T = xp.matrix_transpose(A if A.shape[:-2] == lead else xp.broadcast_to(A, (*lead, *A.shape[-2:])))
    column = (b if b.shape[:-1] == lead else xp.broadcast_to(b, (*lead, b.shape[-1])))[..., None]
    return (_by_halves(T, column, xp) if compat.is_dask_namespace(xp) else xp.linalg.solve(T, column))[..., 0]


def _by_halves(A: Array, b: Array, xp: Namespace) -> Array:
    """A^{-1} b by halves, for libraries without batched solves: A is close to symmetric and definite.

    [A B; C D] [x; y] = [b; d]:  (D - C A^{-1} B) y = d - C A^{-1} b,  A x = b - B y
    """
    K = A.shape[-1]
    if K == 1:
        return b / A
    n = K // 2
    B, C, D = A[..., :n, n:], A[..., n:, :n], A[..., n:, n:]
    both = xp.concat([xp.broadcast_to(B, (*b.shape[:-2], n, K - n)), b[..., :n, :]], axis=-1)
    solved = _by_halves(A[..., :n, :n], both, xp)
    y = _by_halves(D - C @ solved[..., : K - n], b[..., n:, :] - C @ solved[..., K - n :], xp)
    return xp.concat([solved[..., K - n :] - solved[..., : K - n] @ y, y], axis=-2)


def first_singular(xp: Namespace, A: Array) -> tuple[int, ...] | None:
    """The index of the first matrix of A (..., K, K) whose smallest eigenvalue is 0 up to rounding, or None."""
    K = A.shape[-1]
    finite = xp.all(xp.isfinite(A), axis=(-2, -1))
    A = xp.where(finite[..., None, None], A, xp.eye(K, dtype=A.dtype))
    values = xp.linalg.eigvalsh((A + xp.matrix_transpose(A)) / 2)
    bad = values[..., 0] <= K * float(xp.finfo(A.dtype).eps) * values[..., -1]
    if not bool(xp.any(bad)):
        return None
    n = int(xp.argmax(xp.astype(xp.reshape(bad, (math.prod(bad.shape),)), xp.int32)))
    index = []
    for size in reversed(bad.shape):
        n, i = divmod(n, size)
        index.append(i)
    return tuple(reversed(index))
