"""Products of small matrices, triangular solves and transposes, in register tiles.

A tile is R rows of L vectors of the result that stay in registers while the inner index runs: of every row of A one
number is spread over a vector and multiplied with L vectors of B. Each element of a result is one chain of fused
multiply-adds over the inner index, whatever the tile it falls into: the bits do not depend on how a matrix is cut.
Matrices are addresses with strides, so a transpose is a change of strides and a column block a change of address.
"""

from __future__ import annotations

from llvmlite import ir

from .emit import I32, LANES, ROWS, Emit, Mat, Rows, Value, routine
from .rows import ask

PAD = 8  # tokens of a chunk are padded to whole tiles
FULL, LEFT_LOWER, LEFT_UPPER, OUT_LOWER = 0, 1, 2, 3  # which half of a matrix is zero, or not wanted


def _sums(e: Emit, A: list[Value], a_col: Value, B: Value, b_row: Value, K: Value, masks: list[Value | None]) -> list:
    """The loop over the inner index: R L sums of A_ik B_k."""
    L = len(masks)
    sums = [e.variable(e.zero()) for _ in range(len(A) * L)]
    with e.each(K) as k:
        row, column = B + k * b_row * e.size, k * a_col * e.size
        B_k = [e.load(row + j * e.W * e.size, masks[j]) for j in range(L)]
        for i, at in enumerate(A):
            a = e.spread(e.get(at + column))
            for j in range(L):
                s = sums[i * L + j]
                s.set(e.fma(a, B_k[j], s.get()))
    return [s.get() for s in sums]


def _product_tile(e: Emit, R: int, L: int, masked: bool, A: Mat, B: Mat, rows: Rows, added: Mat, added_rows: Rows,
                  out: Mat, m: Value, n: Value, K: Value) -> None:  # fmt: skip
    """out_i = rows_i (A B)_i + added_rows_i added_i for R rows and L vectors; added.at = 0 where nothing is added.

    Rows from m on repeat row m - 1: they compute and store the same numbers once more.
    """
    inside = [e.whole(i) < m for i in range(R)]
    walk = lambda at, step: _walk(e, inside, at, step * e.size)  # noqa: E731
    masks = [e.below(n, j * e.W) if masked else None for j in range(L)]
    sums = _sums(e, walk(A.at, A.row), A.col, B.at, B.row, K, masks)
    for i, at in enumerate(walk(rows.at, rows.step)):
        factor = e.spread(e.get(at))
        for j in range(L):
            sums[i * L + j] = sums[i * L + j] * factor
    total = [e.variable(x) for x in sums]
    with e.when(added.at.compare("!=", 0)):
        factors = walk(added_rows.at, added_rows.step)
        for i, at in enumerate(walk(added.at, added.row)):
            factor = e.spread(e.get(factors[i]))
            for j in range(L):
                total[i * L + j].set(e.fma(e.load(at + j * e.W * e.size, masks[j]), factor, sums[i * L + j]))
    for i, at in enumerate(walk(out.at, out.row)):
        for j in range(L):
            e.store(total[i * L + j].get(), at + j * e.W * e.size, masks[j])


def _walk(e: Emit, inside: list[Value], at: Value, step: Value) -> list[Value]:
    """Addresses of rows, each `step` bytes after the one before while there are rows."""
    found = [at]
    for more in inside[1:]:
        found.append(e.select(more, found[-1] + step, found[-1]))
    return found


@routine
def product(e: Emit, half: Value, A: Mat, B: Mat, m: Value, n: Value, k: Value, rows: Rows, added: Mat,
            added_rows: Rows, out: Mat, expected: Value) -> None:  # fmt: skip
    """out = diag(rows) A B + diag(added_rows) added:  A (m, k), B (k, n), added (m, n); but A with columns of stride 1.

    half  LEFT_LOWER, LEFT_UPPER: only that triangle of A is read; OUT_LOWER: out is computed up to its diagonal's tile.
    expected  what memory is asked for before each tile: few lines at a time, more would wait for one another; or 0.
    """
    few = half.equals(FULL) & (m <= 2)
    step = e.select(few, 4 * e.W, e.whole(LANES * e.W))
    with e.each(n, step=step) as j:
        first = e.select(half.equals(OUT_LOWER), j // ROWS * ROWS, 0)
        with e.each(m, start=first, step=ROWS) as i:
            begin = e.select(half.equals(LEFT_UPPER), i, 0)
            end = e.select(half.equals(LEFT_LOWER), e.least(k, i + ROWS), k)
            columns = e.select(half.equals(OUT_LOWER), e.least(n, i + ROWS), n) - j
            given = (
                Mat(A.at + (i * A.row + begin * A.col) * e.size, A.row, A.col),
                Mat(e.address(B, begin, j), B.row, 1),
                Rows(rows.at + i * rows.step * e.size, rows.step),
                Mat(e.select(added.at.equals(0), 0, e.address(added, i, j)), added.row, 1),
                Rows(added_rows.at + i * added_rows.step * e.size, added_rows.step),
                Mat(e.address(out, i, j), out.row, 1),
                m - i, columns, end - begin,
            )  # fmt: skip
            with e.when(expected.compare("!=", 0)):
                ask(e, expected)
            e.choose(
                (few, lambda: _product_tile(e, 2, 4, True, *given)),
                (step <= columns, lambda: _product_tile(e, ROWS, LANES, False, *given)),
                (e.whole(e.W) < columns, lambda: _product_tile(e, ROWS, LANES, True, *given)),
                otherwise=lambda: _product_tile(e, ROWS, 1, True, *given),
            )


def _solve_tile(e: Emit, R: int, L: int, masked: bool, N: Mat, top: Value, X: Mat, n: Value, K: Value) -> None:
    """R rows of (1 + N) X = Y in place: X_i -= (N X)_i over the K rows above, then substitution inside the tile."""
    masks = [e.below(n, j * e.W) if masked else None for j in range(L)]
    rows = [N.at + i * N.row * e.size for i in range(R)]
    sums = _sums(e, rows, N.col, top, X.row, K, masks)
    X_at = [[e.address(X, i, j * e.W) for j in range(L)] for i in range(R)]
    x = [[e.load(X_at[i][j], masks[j]) - sums[i * L + j] for j in range(L)] for i in range(R)]
    for i in range(1, R):
        for s in range(i):
            coefficient = e.spread(-e.get(rows[i] + (K + s) * N.col * e.size))
            x[i] = [e.fma(coefficient, x[s][j], x[i][j]) for j in range(L)]
    for i in range(R):
        for j in range(L):
            e.store(x[i][j], X_at[i][j], masks[j])


@routine
def solve_lower(e: Emit, N: Mat, X: Mat, m: Value, n: Value) -> None:
    """X <- (1 + N)^-1 X:  N (m, m) strictly lower, X (m, n) with columns of stride 1, m a multiple of 8."""
    step = e.W * LANES
    with e.each(n, step=step) as j:
        top = X.at + j * e.size
        with e.each(m, step=ROWS) as i:
            given = Mat(N.at + i * N.row * e.size, N.row, N.col), top, Mat(top + i * X.row * e.size, X.row, 1), n - j, i
            e.choose(
                (e.whole(step) <= n - j, lambda: _solve_tile(e, ROWS, LANES, False, *given)),
                otherwise=lambda: _solve_tile(e, ROWS, LANES, True, *given),
            )


@routine
def solve_lower_transposed(e: Emit, N: Mat, X: Mat, m: Value, n: Value) -> None:
    """X <- (1 + N)^-T X: read from the last row up, 1 + N^T is lower."""
    end = N.at + (N.row + N.col) * (m - 1) * e.size
    solve_lower(e, Mat(end, -N.col, -N.row), Mat(e.address(X, m - 1), -X.row, 1), m, n)


@routine
def transpose(e: Emit, A: Mat, m: Value, n: Value, out: Mat) -> None:
    """out = A^T:  A (m, n) and out (n, m) with columns of stride 1, and room for whole vectors in rows and in out."""
    with e.each(m, step=e.W) as i, e.each(n, step=e.W) as j:
        _transpose_tile(e, e.address(A, i, j), A.row, m - i, e.address(out, j, i), out.row)


def _transpose_tile(e: Emit, A: Value, a_row: Value, m: Value, out: Value, out_row: Value) -> None:
    """A square of W rows of one vector, row m - 1 again from m on: halves change places at distances W / 2, ..., 1."""
    W, lanes = e.W, ir.VectorType(I32, e.W)
    r = [e.load(A + e.least(e.whole(i), m - 1) * a_row * e.size).v for i in range(W)]
    s = W // 2
    while s:
        low = ir.Constant(lanes, [w if not w & s else W + w - s for w in range(W)])
        high = ir.Constant(lanes, [w + s if not w & s else W + w for w in range(W)])
        for i in range(W):
            if not i & s:
                r[i], r[i | s] = e.b.shuffle_vector(r[i], r[i | s], low), e.b.shuffle_vector(r[i], r[i | s], high)
        s //= 2
    for i in range(W):
        e.store(Value(e, r[i]), out + out_row * (i * e.size))
