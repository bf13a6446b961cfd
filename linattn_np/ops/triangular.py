"""The unit lower system (I + A) X = R, A strictly lower, by blocked substitution; and its transpose.

Each diagonal block of up to 32 rows is inverted once: blocks of 8 row by row, then merged to 16 and 32. Substitution
then runs block by block. No power of A is formed: with repeated keys powers grow like binomial coefficients.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ..runtime.arrays import Array, Namespace, device, is_mutable, keep_lower, transposed_rows
from .product import matmul

DIAGONAL_ROWS = 32  # of a diagonal block that is inverted: one product then solves a chunk of 32
ROW_BY_ROW = 8  # rows of the blocks inverted row by row: each row is one library call for all blocks side by side


class UnitLower(NamedTuple):
    """I + A, factorised: A (..., C, C) and the inverses of its diagonal blocks, each (..., up to 32, up to 32)."""

    A: Array  # None if there is one block and only `solve` follows
    inverse: list[Array]


def unit_lower(xp: Namespace, A: Array) -> UnitLower:
    """I + A with its diagonal blocks inverted.   A (..., C, C) strictly lower."""
    C, size = A.shape[-1], ROW_BY_ROW
    while size < min(C, DIAGONAL_ROWS):
        size *= 2
    padded = _padded(xp, A, -(-C // size) * size)
    inverse = _by_rows(xp, _blocks(xp, padded, ROW_BY_ROW))
    n = ROW_BY_ROW
    while n < size:  # [F 0; B G]^{-1} = [F^{-1} 0; -G^{-1} B F^{-1} G^{-1}]
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        inverse = _block_lower(xp, first, -matmul(xp, second, matmul(xp, _blocks(xp, padded, 2 * n, n), first)), second)
        n *= 2
    ends = [min(size, C - s) for s in range(0, C, size)]
    return UnitLower(A, [inverse[..., i, :n, :n] for i, n in enumerate(ends)])


def forward_part(L: UnitLower) -> UnitLower:
    """The arrays that `solve` needs."""
    return L._replace(A=None) if len(L.inverse) == 1 else L


def solve(xp: Namespace, L: UnitLower, R: Array) -> Array:
    """X with (I + A) X = R.   R (..., C, V)."""
    return _substitute(xp, L, R, transposed=False)


def solve_transposed(xp: Namespace, L: UnitLower, R: Array) -> Array:
    """X with (I + A)^T X = R.   R (..., C, V)."""
    return _substitute(xp, L, R, transposed=True)


def solve_vjp(xp: Namespace, L: UnitLower, X: Array, dX: Array) -> tuple[Array, Array]:
    """(dA, dR): dR solves the transposed system, (I + A)^T dR = dX, and dA = -tril(dR X^T, -1)."""
    dR = solve_transposed(xp, L, dX)
    return keep_lower(xp, -matmul(xp, dR, xp.matrix_transpose(X)), strict=True), dR


def _substitute(xp: Namespace, L: UnitLower, R: Array, transposed: bool) -> Array:
    (A, inverse), T = L, xp.matrix_transpose
    if len(inverse) == 1:
        return matmul(xp, T(inverse[0]) if transposed else inverse[0], R)
    starts = range(0, A.shape[-1], inverse[0].shape[-1])
    done: dict[int, Array] = {}
    for n, s in reversed(list(enumerate(starts))) if transposed else enumerate(starts):
        block = inverse[n]
        e = s + block.shape[-1]
        rest = R[..., s:e, :]
        for j, X in done.items():
            d = j + X.shape[-2]
            rest = rest - matmul(xp, T(A[..., j:d, s:e]) if transposed else A[..., s:e, j:d], X)
        done[s] = matmul(xp, T(block) if transposed else block, rest)
    return xp.concat([done[s] for s in starts], axis=-2)


def _blocks(xp: Namespace, A: Array, size: int, below: int = 0) -> Array:
    """The diagonal blocks of A, or the square blocks `below` rows under their corners: (..., blocks, n, n)."""
    n = size - below
    starts = range(0, A.shape[-1], size)
    return xp.stack([A[..., s + below : s + below + n, s : s + n] for s in starts], axis=-3)


def _block_lower(xp: Namespace, F: Array, B: Array, G: Array) -> Array:
    """[F 0; B G]."""
    n = F.shape[-1]
    if is_mutable(xp):  # a third of the time of concat
        out = xp.zeros((*F.shape[:-2], 2 * n, 2 * n), dtype=F.dtype, device=device(F))
        out[..., :n, :n], out[..., n:, :n], out[..., n:, n:] = F, B, G
        return out
    return xp.concat([xp.concat([F, xp.zeros_like(F)], axis=-1), xp.concat([B, G], axis=-1)], axis=-2)


def _by_rows(xp: Namespace, A: Array) -> Array:
    """(I + A)^{-1} of all small blocks at once, blocks along the last axis: X_i = e_i - sum over l < i of A_il X_l."""
    n, count = A.shape[-1], math.prod(A.shape[:-2])
    rows = xp.reshape(transposed_rows(xp, xp.reshape(A, (count, n * n))), (n, n, count))
    eye = xp.eye(n, dtype=A.dtype, device=device(A))
    X = xp.broadcast_to(eye[:1, :, None], (1, n, count))
    for i in range(1, n):
        row = eye[i, :, None] - xp.sum(rows[i, :i, None, :] * X, axis=0)
        X = xp.concat([X, row[None, ...]], axis=0)
    return xp.reshape(transposed_rows(xp, xp.reshape(X, (n * n, count))), A.shape)


def _padded(xp: Namespace, A: Array, n: int) -> Array:
    """A padded with zeros to n x n."""
    C, where = A.shape[-1], device(A)
    if n == C:
        return A
    right = xp.zeros((*A.shape[:-1], n - C), dtype=A.dtype, device=where)
    below = xp.zeros((*A.shape[:-2], n - C, n), dtype=A.dtype, device=where)
    return xp.concat([xp.concat([A, right], axis=-1), below], axis=-2)
