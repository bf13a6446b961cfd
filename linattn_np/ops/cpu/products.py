"""Products of small matrices, unit lower triangular systems and transposes, tile by tile."""

from __future__ import annotations

from ...runtime.pieces.piece import Matrix, Vector, Whole, piece
from ...runtime.pieces.tiles import product_tile, solve_tile, transpose_tile
from ...runtime.pieces.vectors import BYTES, LANES, ROWS
from ...runtime.pieces.views import backwards, transposed

FULL, LEFT_LOWER, LEFT_UPPER, OUT_LOWER = 0, 1, 2, 3  # which half of a matrix is zero, or not wanted

whole_tile, masked_tile = product_tile(ROWS, LANES, False), product_tile(ROWS, LANES, True)
narrow_tile = product_tile(ROWS, 1, True)
FEW, LONG = 2, ROWS * LANES // 2  # rows and vectors of a tile of few rows, which others would repeat
long_tile = product_tile(FEW, LONG, True)


@piece
def product(half: Whole, A: Matrix, B: Matrix, out: Matrix, rows: Vector = None, added: Matrix = None,
            weights: Vector = None):  # fmt: skip
    """out = diag(rows) A B + diag(weights) added;  A (m, k), B (k, n).

    LEFT_LOWER, LEFT_UPPER: only that triangle of A is read; OUT_LOWER: out is computed up to its diagonal's tile.
    """
    m, n = out.shape
    lane = BYTES // out.itemsize
    is_long = m <= ROWS // 2 and n > lane
    height, wide, factors = FEW if is_long else ROWS, (LONG if is_long else LANES) * lane, (rows, weights)
    inner = min(A.shape[1], B.shape[0])
    for j in range(0, n, wide):
        for i in range(j // height * height if half == OUT_LOWER else 0, m, height):
            begin = i if half == LEFT_UPPER else 0
            end = min(i + height, inner) if half == LEFT_LOWER else inner
            columns = (min(i + height, n) if half == OUT_LOWER else n) - j
            at = (i, j, begin, end)
            if is_long:
                long_tile(A, B, at, out, factors, added)
            elif columns >= wide and B.shape[1] - j >= wide:
                whole_tile(A, B, at, out, factors, added)
            elif columns > lane:
                masked_tile(A, B, at, out, factors, added)
            else:
                narrow_tile(A, B, at, out, factors, added)


@piece
def solve(N: Matrix, X: Matrix):
    """X <- (1 + N)^-1 X, N strictly lower."""
    wide = LANES * (BYTES // X.itemsize)
    for j in range(0, X.shape[1], wide):
        for i in range(0, X.shape[0], ROWS):
            solve_tile(N, X, i, j)


@piece
def solve_transposed(N: Matrix, X: Matrix):
    """X <- (1 + N)^-T X: read from the last row up, 1 + N^T is lower."""
    solve(backwards(transposed(N), True), backwards(X, False))


@piece
def transpose(A: Matrix, out: Matrix):
    """out = A^T"""
    lane = BYTES // out.itemsize
    for i in range(0, A.shape[0], lane):
        for j in range(0, A.shape[1], lane):
            transpose_tile(A, out, i, j)
