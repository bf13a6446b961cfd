"""The unit-lower system (I + N) X = R, N strictly lower, by blocked substitution; and its transpose.

Each diagonal block of up to 32 is inverted once: blocks of 8 row by row, then merged to 16 and 32. Blocks are then
substituted one after the other. No power of N is ever formed: on equal keys those grow like binomials.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ..ground.namespace import Array, Namespace, device, is_mutable, keep_lower, turned

BLOCK = 32
SMALLEST = 8


class UnitLower(NamedTuple):
    """I + N, ready to be solved: N (..., C, C) and its inverted diagonal blocks, each (..., up to 32, up to 32)."""

    N: Array  # None where one block is all
    inverse: list[Array]


def unit_lower(xp: Namespace, N: Array) -> UnitLower:
    """I + N with its diagonal blocks inverted.   N (..., C, C) strictly lower."""
    C, size = N.shape[-1], SMALLEST
    while size < min(C, BLOCK):
        size *= 2
    padded = _padded(xp, N, -(-C // size) * size)
    inverse = _by_rows(xp, _blocks(xp, padded, SMALLEST))
    n = SMALLEST
    while n < size:  # [A 0; B D]^{-1} = [A' 0; -D' B A' D']
        A, D = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        inverse = _joined(xp, A, -D @ (_blocks(xp, padded, 2 * n, n) @ A), D)
        n *= 2
    ends = [min(size, C - s) for s in range(0, C, size)]
    return UnitLower(N, [inverse[..., i, :n, :n] for i, n in enumerate(ends)])


def slim(L: UnitLower) -> UnitLower:
    """What `solve` needs."""
    return L._replace(N=None) if len(L.inverse) == 1 else L


def solve(xp: Namespace, L: UnitLower, R: Array) -> Array:
    """X with (I + N) X = R.   R (..., C, V)."""
    return _substitute(xp, L, R, transposed=False)


def solve_vjp(xp: Namespace, L: UnitLower, X: Array, dX: Array) -> tuple[Array, Array]:
    """(dN, dR): dR solves the transposed system, (I + N)^T dR = dX, and dN = -tril(dR X^T, -1)."""
    dR = _substitute(xp, L, dX, transposed=True)
    return keep_lower(xp, -dR @ xp.matrix_transpose(X), strict=True), dR


def _substitute(xp: Namespace, L: UnitLower, R: Array, transposed: bool) -> Array:
    (N, inverse), T = L, xp.matrix_transpose
    if len(inverse) == 1:
        return (T(inverse[0]) if transposed else inverse[0]) @ R
    starts = range(0, N.shape[-1], inverse[0].shape[-1])
    done: dict[int, Array] = {}
    for n, s in reversed(list(enumerate(starts))) if transposed else enumerate(starts):
        block = inverse[n]
        e = s + block.shape[-1]
        rest = R[..., s:e, :]
        for j, X in done.items():
            d = j + X.shape[-2]
            rest = rest - (T(N[..., j:d, s:e]) if transposed else N[..., s:e, j:d]) @ X
        done[s] = (T(block) if transposed else block) @ rest
    return xp.concat([done[s] for s in starts], axis=-2)


def _blocks(xp: Namespace, N: Array, size: int, below: int = 0) -> Array:
    """The diagonal blocks of N, or the squares that lie `below` rows under their corners: (..., blocks, n, n)."""
    n = size - below
    starts = range(0, N.shape[-1], size)
    return xp.stack([N[..., s + below : s + below + n, s : s + n] for s in starts], axis=-3)


def _joined(xp: Namespace, A: Array, B: Array, D: Array) -> Array:
    """[A 0; B D]."""
    n = A.shape[-1]
    if is_mutable(xp):  # a third of the time of concat
        whole = xp.zeros((*A.shape[:-2], 2 * n, 2 * n), dtype=A.dtype, device=device(A))
        whole[..., :n, :n], whole[..., n:, :n], whole[..., n:, n:] = A, B, D
        return whole
    return xp.concat([xp.concat([A, xp.zeros_like(A)], axis=-1), xp.concat([B, D], axis=-1)], axis=-2)


def _by_rows(xp: Namespace, N: Array) -> Array:
    """(I + N)^{-1} of all small blocks at once, blocks along the last axis: X_i = e_i - sum over l < i of N_il X_l."""
    n, count = N.shape[-1], math.prod(N.shape[:-2])
    rows = xp.reshape(turned(xp, xp.reshape(N, (count, n * n))), (n, n, count))
    eye = xp.eye(n, dtype=N.dtype, device=device(N))
    X = xp.broadcast_to(eye[:1, :, None], (1, n, count))
    for i in range(1, n):
        row = eye[i, :, None] - xp.sum(rows[i, :i, None, :] * X, axis=0)
        X = xp.concat([X, row[None, ...]], axis=0)
    return xp.reshape(turned(xp, xp.reshape(X, (n * n, count))), N.shape)


def _padded(xp: Namespace, N: Array, n: int) -> Array:
    """N brought to n x n with zeros."""
    C, where = N.shape[-1], device(N)
    if n == C:
        return N
    right = xp.zeros((*N.shape[:-1], n - C), dtype=N.dtype, device=where)
    below = xp.zeros((*N.shape[:-2], n - C, n), dtype=N.dtype, device=where)
    return xp.concat([xp.concat([N, right], axis=-1), below], axis=-2)
