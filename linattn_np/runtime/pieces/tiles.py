"""The register tiles: products, triangular systems and transposes, and passes over rows in whole vectors.

R rows of L vectors of a result stay in registers while the inner index runs: of every row of A one number is broadcast
and multiplied with L vectors of B. Each element is one chain of fused multiply-adds, whatever its tile: the bits do not
depend on how a matrix is cut. Sums along rows are one vector of partial sums, added in pairs: their bits depend on the
number of terms alone. What each tile does stands above it in Python.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .vectors import I64, LANES, ROWS, Array, Builder, Value, constant, emitted, fma, known, lane, lanes, loop, total


def _sums(b: Builder, A: Array, rows: list[Value], B: Array, j: Value, bounds: Any, masks: list) -> list:
    """sum of A_ik B_kj, k = begin .. end, for every row and vector."""
    sums = [[B.sum() for _ in masks] for _ in rows]
    with loop(b, *bounds) as k:
        B_k = [B.load(B.at(k, j), n, mask) for n, mask in enumerate(masks)]
        for at, chain in zip(rows, sums, strict=True):
            a = A.broadcast(b.add(at, b.mul(k, A.steps[1])))
            for x, s in zip(B_k, chain, strict=True):
                b.store(fma(b, a, x, b.load(s)), s)
    return [[b.load(s) for s in chain] for chain in sums]


def _product_tile(R: int, L: int) -> Any:
    def tile(A, B, at, out, factors, added):  # type: ignore[no-untyped-def]
        (i, j, begin, end), (rows, weights) = at, factors
        i2, j2 = min(i + R, len(out)), min(j + L * lane(out.dtype), out.shape[1])
        x = A[i:i2, begin:end] @ B[begin:end, j:j2]
        x = np.pad(x, ((0, 0), (0, j2 - j - x.shape[1])))
        if len(rows):
            x = rows[i:i2, None] * x
        if len(added):
            y = added[i:i2, j:j2] * (weights[i:i2, None] if len(weights) else 1)
            x[:, : y.shape[1]] += y
        out[i:i2, j:j2] = x

    return tile


def product_tile(R: int, L: int, masked: bool) -> Any:
    """R rows and L vectors of out = diag(rows) A B + diag(weights) added, starting at i, j; k = begin .. end.

    at = (i, j, begin, end), factors = (rows, weights); empty arrays stand for 1, or 0. Where B has fewer columns than
    out the rest is 0.
    """

    @emitted(_product_tile(R, L))
    def tile(b: Builder, A: Array, B: Array, at: Any, out: Array, factors: Any, added: Array) -> None:
        (i, j, begin, end), (rows, weights) = at, factors
        stored = out.masks(out.shape[1], j, L) if masked else [None] * L
        inside = B.masks(B.shape[1], j, L) if masked else stored
        here = out.inside(i, R)
        sums = _sums(b, A, A.rows(here), B, j, (begin, end), inside)
        result = [[out.sum(s) for s in chain] for chain in sums]
        with b.if_then(rows.given):
            for chain, at_row in zip(result, rows.rows(here), strict=True):
                f = rows.broadcast(at_row)
                for s in chain:
                    b.store(b.fmul(b.load(s), f), s)
        with b.if_then(added.given):
            inside = added.masks(added.shape[1], j, L) if masked else stored
            one = b.ptrtoint(out.sum(constant(weights.number, 1)), I64)
            for chain, at_row, w in zip(result, added.rows(here, j), weights.rows(here), strict=True):
                f = weights.broadcast(b.select(weights.given, w, one))
                for n, s in enumerate(chain):
                    b.store(fma(b, added.load(at_row, n, inside[n]), f, b.load(s)), s)
        for chain, at_row in zip(result, out.rows(here, j), strict=True):
            for n, s in enumerate(chain):
                out.store(b.load(s), at_row, n, stored[n])

    return tile


def _solve_tile(N, X, i, j):  # type: ignore[no-untyped-def]
    i2, j2 = min(i + ROWS, len(X)), min(j + LANES * lane(X.dtype), X.shape[1])
    x = X[i:i2, j:j2]
    x -= N[i:i2, :i] @ X[:i, j:j2]
    for r in range(i + 1, i2):
        x[r - i] -= N[r, i:r] @ x[: r - i]


@emitted(_solve_tile)
def solve_tile(b: Builder, N: Array, X: Array, i: Value, j: Value) -> None:
    """Rows i .. of (1 + N) X = Y in place, columns j ..: Y_i - sum_{k < i} N_ik X_k, then inside the tile."""
    here, masks = X.inside(i, ROWS), X.masks(X.shape[1], j, LANES)
    rows, at = N.rows(here), X.rows(here, j)
    sums = _sums(b, N, rows, X, j, (I64(0), i), masks)
    x = [[b.fsub(X.load(at[r], n, masks[n]), sums[r][n]) for n in range(LANES)] for r in range(ROWS)]
    for r in range(1, ROWS):
        above = b.icmp_signed("<", b.add(i, I64(r)), X.shape[0])  # a repeated last row is unchanged
        for s in range(r):
            a = b.fneg(N.broadcast(b.add(rows[r], b.mul(b.add(i, I64(s)), N.steps[1]))))
            x[r] = [fma(b, a, y, z) for y, z in zip(x[s], x[r], strict=True)]
        x[r] = [b.select(above, y, z) for y, z in zip(x[r], x[r - 1], strict=True)]
    for r in range(ROWS):
        for n in range(LANES):
            X.store(x[r][n], at[r], n, masks[n])


def _transpose_tile(A, out, i, j):  # type: ignore[no-untyped-def]
    W = lane(A.dtype)
    x = A[i : i + W, j : j + W].T
    to = out[j : j + len(x), i : i + W]
    there = min(x.shape[1], to.shape[1])
    to[:, :there], to[:, there:] = (
        x[: len(to), :there],
        x[: len(to), -1:],
    )  # lanes past the last row of A repeat that row


@emitted(_transpose_tile)
def transpose_tile(b: Builder, A: Array, out: Array, i: Value, j: Value) -> None:
    """out_ji = A_ij for a square of one vector: halves change places at distances W / 2, ..., 1."""
    W = A.vector.count
    inside, outside = A.masks(A.shape[1], j, 1)[0], out.masks(out.shape[1], i, 1)[0]
    r, s = [A.load(at, 0, inside) for at in A.rows(A.inside(i, W), j)], W // 2
    while s:
        low = lanes(w if not w & s else W + w - s for w in range(W))
        high = lanes(w + s if not w & s else W + w for w in range(W))
        for k in range(W):
            if not k & s:
                r[k], r[k | s] = b.shuffle_vector(r[k], r[k | s], low), b.shuffle_vector(r[k], r[k | s], high)
        s //= 2
    for x, at in reversed(list(zip(r, out.rows(out.inside(j, W), i), strict=True))):  # a repeated row is stored first
        out.store(x, at, 0, outside)


# rows


def number_of(x: Any, *_: Any) -> Any:
    """The type of an array's numbers."""
    return x.dtype


def _total(b: Builder, x: Array, n: Value, add: Callable[..., Value]) -> Value:
    """The total of sums <- add(sums, j, mask) over the vectors of n numbers; only the last one is masked."""
    sums, whole = x.sum(), b.and_(n, I64(-x.vector.count))
    with x.vectors(I64(0), whole) as j:
        b.store(add(b.load(sums), j, None), sums)
    with b.if_then(b.icmp_signed("<", whole, n)):
        b.store(add(b.load(sums), whole, x.masks(n, whole, 1)[0]), sums)
    return total(b, b.load(sums))


def _dot(x, y, n):  # type: ignore[no-untyped-def]
    return (x[:n] * y[:n]).sum(dtype=x.dtype) if n > 0 else x.dtype.type(0)


@emitted(_dot, number_of)
def dot(b: Builder, x: Array, y: Array, n: Value) -> Value:
    """x . y of the first n numbers."""
    return _total(b, x, n, lambda sums, j, mask: fma(b, x.load(x.at(j), 0, mask), y.load(y.at(j), 0, mask), sums))


def _sum_of(x, n):  # type: ignore[no-untyped-def]
    return x[:n].sum(dtype=x.dtype) if n > 0 else x.dtype.type(0)


@emitted(_sum_of, number_of)
def sum_of(b: Builder, x: Array, n: Value) -> Value:
    """The sum of the first n numbers."""
    return _total(b, x, n, lambda sums, j, mask: b.fadd(sums, x.load(x.at(j), 0, mask)))


@emitted(lambda x, n: np.fmax.reduce(x[:n], initial=-np.inf), number_of)
def max_of(b: Builder, x: Array, n: Value) -> Value:
    """The largest of the first n numbers, -inf of none; a NaN may be passed over."""
    low = x.every(float("-inf"))
    most = x.sum(low)
    with x.vectors(I64(0), n) as j:
        mask = x.masks(n, j, 1)[0]
        y = b.select(mask, x.load(x.at(j), 0, mask), low)
        b.store(b.select(b.fcmp_ordered(">", y, b.load(most)), y, b.load(most)), most)
    largest = known(b, f"llvm.vector.reduce.fmax.v{x.vector.count}f{x.size * 8}", x.number, [x.vector])
    return b.call(largest, [b.load(most)])


def _copy_row(x, to, count):  # type: ignore[no-untyped-def]
    to[:count] = x[:count]
    to[count:] = 0


@emitted(_copy_row)
def copy_row(b: Builder, x: Array, to: Array, count: Value) -> None:
    """The first `count` numbers of x, and zeros to the end of `to`."""
    whole = b.and_(count, I64(-x.vector.count))
    with x.vectors(I64(0), whole) as j:
        to.store(x.load(x.at(j)), to.at(j))
    with x.vectors(whole, to.shape[0]) as j:
        y = x.load(x.at(j), 0, x.masks(count, j, 1)[0])
        to.store(y, to.at(j), 0, to.masks(to.shape[0], j, 1)[0])
