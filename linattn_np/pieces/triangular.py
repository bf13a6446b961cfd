"""The unit-lower system (I + N) X = R, N strictly lower, by blocked substitution; and its transpose.

Blocks of 16: each diagonal block is inverted by merging blocks of 1, 2, 4, 8 (substitution by halves), then the
blocks are substituted one after the other. No power of N is ever formed: on equal keys those grow like binomials.
"""

from __future__ import annotations

from ..ground.namespace import Array, Namespace, device, keep_lower

BLOCK = 16


def solve_unit_lower(xp: Namespace, N: Array, R: Array) -> Array:
    """X with (I + N) X = R.   N (..., C, C) strictly lower, R (..., C, V)."""
    return _substitute(xp, N, R, transposed=False)


def solve_unit_lower_vjp(xp: Namespace, N: Array, X: Array, dX: Array) -> tuple[Array, Array]:
    """(dN, dR): dR solves the transposed system, (I + N)^T dR = dX, and dN = -tril(dR X^T, -1)."""
    dR = _substitute(xp, N, dX, transposed=True)
    return -keep_lower(xp, dR @ xp.matrix_transpose(X), strict=True), dR


def _substitute(xp: Namespace, N: Array, R: Array, transposed: bool) -> Array:
    C = N.shape[-1]
    starts = range(0, C, BLOCK)
    inverse = _diagonal_inverses(xp, N)
    done: dict[int, Array] = {}
    for n, s in reversed(list(enumerate(starts))) if transposed else enumerate(starts):
        e = min(s + BLOCK, C)
        block, rest = inverse[..., n, : e - s, : e - s], R[..., s:e, :]
        if transposed:
            block = xp.matrix_transpose(block)
            for j, X in done.items():
                rest = rest - xp.matrix_transpose(N[..., j : min(j + BLOCK, C), s:e]) @ X
        else:
            for j, X in done.items():
                rest = rest - N[..., s:e, j : min(j + BLOCK, C)] @ X
        done[s] = block @ rest
    return xp.concat([done[s] for s in starts], axis=-2)


def _diagonal_inverses(xp: Namespace, N: Array) -> Array:
    """(I + N)^{-1} of every diagonal block of 16, the last one padded by zeros: (..., blocks, 16, 16)."""
    C = N.shape[-1]
    spans = [slice(s, min(s + BLOCK, C)) for s in range(0, C, BLOCK)]
    blocks = xp.stack([_padded(xp, N[..., span, span]) for span in spans], axis=-3)
    inverse = xp.ones((*blocks.shape[:-2], BLOCK, 1, 1), dtype=N.dtype, device=device(N))
    size = 1
    while size < BLOCK:  # [A 0; B D]^{-1} = [A' 0; -D' B A' D']
        pairs = range(0, BLOCK, 2 * size)
        B = xp.stack([blocks[..., i + size : i + 2 * size, i : i + size] for i in pairs], axis=-3)
        A, D = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        upper = xp.concat([A, xp.zeros_like(A)], axis=-1)
        lower = xp.concat([-(D @ (B @ A)), D], axis=-1)
        inverse = xp.concat([upper, lower], axis=-2)
        size *= 2
    return inverse[..., 0, :, :]


def _padded(xp: Namespace, block: Array) -> Array:
    """A block of n <= 16 rows, brought to 16 x 16 with zeros."""
    n = block.shape[-1]
    if n == BLOCK:
        return block
    where = device(block)
    right = xp.zeros((*block.shape[:-1], BLOCK - n), dtype=block.dtype, device=where)
    below = xp.zeros((*block.shape[:-2], BLOCK - n, BLOCK), dtype=block.dtype, device=where)
    return xp.concat([xp.concat([block, right], axis=-1), below], axis=-2)

