"""The systems of a SOLVED read-out in compiled loops, by conjugate gradients or exactly: readouts/systems.py's.

The solutions are the output of the forward kernel.

    x_t (Z_t + diag(ridge_t)) = q_t, Z_t the sum of the keys' outer products: rows of a chunk step together, and
    p A_i = p^_i Z + sum_{j <= i} gram(p, k)_ij beta_j k_j + ridge_i (.) p_i

Of a sequence of one token Z_t is formed first, Z_t = e^g Z + k^T beta k, in rows of whole blocks of columns, which stay
in the cache: a step is then one pass over it and two over vectors. Exact solutions of all tokens are found so: with
rows in the order of their pivots Z_t + diag(ridge_t) = L U, and x is found from x L U = q, U first.
"""

from __future__ import annotations

from typing import Any

from ...ops.cpu.products import LEFT_LOWER, OUT_LOWER, product
from ...ops.cpu.rows import add_hadamard, add_weighted_rows, clear, scaled
from ...ops.cpu.storage import load, save
from ...runtime.pieces.piece import Matrix, Number, Vector, Whole, piece
from ...runtime.pieces.registers import WIDE, fma, registers, store
from ...runtime.pieces.tiles import copy_row, dot
from ...runtime.pieces.vectors import BYTES
from ...runtime.pieces.views import as_row, columns, row, tokens_of
from .chunk import load_queries, read_state
from .decay import weigh
from .passes import block_pass
from .workspace import Work


@piece
def times_A(w: Work):
    """times_A = p A of the rows p = direction."""
    product(OUT_LOWER, w.direction, w.kT, w.P)
    weigh(w.P, w.E, False, w.ones)
    product(LEFT_LOWER, w.P, w.v, w.times_A)
    read_state(w, w.direction, 0, w.ones, 1.0, w.times_A, w.times_A)
    add_hadamard(w.direction, w.ridge, w.times_A)


@piece(of="formed")
def form(w: Work):
    """S = Z after the token."""
    S, k, written, decay = w.S, row(w.k, 0), row(w.v, 0), w.start[w.c]
    for i in range(len(S)):
        to, f = row(S, i), k[i]
        for j in range(len(to)):
            to[j] = decay * to[j]
        for j in range(len(to)):
            to[j] += f * written[j]


def _apply(L: int, ahead: int) -> Any:
    zeros, load = registers(L)

    def apply(w: Work, S: Matrix, to: Matrix = None):
        """Columns of times_A; even and odd rows of narrow blocks have sums of their own: additions do not wait."""
        p, j, even, odd = row(w.direction, 0), w.column, zeros(S), zeros(S)
        for i in range(0, w.K - 1, 2):
            even = fma(p[i], load(row(S, i), j), even)
            if L == WIDE:
                even = fma(p[i + 1], load(row(S, i + 1), j), even)
            else:
                odd = fma(p[i + 1], load(row(S, i + 1), j), odd)
        if w.K % 2:
            even = fma(p[w.K - 1], load(row(S, w.K - 1), j), even)
        store(fma(load(p, j), load(row(w.ridge, 0), j), even + odd), row(w.times_A, 0), j)

    return apply


apply_pass = block_pass("apply", _apply, "formed")


@piece(of="formed")
def times_formed(w: Work):
    """times_A = p (Z + diag(ridge)) of one row."""
    w.column, wide = 0, WIDE * (BYTES // w.S.itemsize)
    while w.column < w.K_lanes:
        w.wide = 1 if w.K_lanes - w.column >= wide else 0
        apply_pass(w, w.S)
        w.column += wide if w.wide else w.lane


@piece
def descend(w: Work, n: Whole) -> Whole:
    """A step of the rows with |r|^2 > bounds; how many are not done.

    a = |r|^2 / <p, p A>, x += a p, r' = r - a p A, p' = r' + b p, b = |r'|^2 / |r|^2
    """
    left = 0
    for i in range(w.c):
        before, limit = w.squares[i], w.bounds[i]
        if not before <= limit:  # a row that is not a number goes on
            p, pA, r = row(w.direction, i), row(w.times_A, i), row(w.residual, i)
            curve = dot(p, pA, n)
            step = before / curve if curve != 0 else before
            add_weighted_rows(None, as_row(p), step, row(w.found, i))
            add_weighted_rows(None, as_row(pA), -step, r)
            after = dot(r, r, n)
            next_direction(after / before, r, p)
            w.squares[i] = after
            if not after <= limit:
                left += 1
    return left


@piece
def next_direction(ratio: Number, r: Vector, p: Vector):
    """p = r + ratio p"""
    for d in range(len(p)):
        p[d] = r[d] + ratio * p[d]


@piece(of="solved")
def solve_rows(w: Work, j: Whole):
    """x from 0, for the rows of query head j."""
    load_queries(w, j)
    load(w.in_r, (w.BATCH, w.HEAD, w.t), (0, w.K), w.ridge)
    clear(w.found)
    scaled(w.q, None, w.residual)
    scaled(w.q, None, w.direction)
    for i in range(w.c):
        w.squares[i] = dot(row(w.q, i), row(w.q, i), w.K_lanes)
        w.bounds[i] = w.enough * w.squares[i]
    for _ in range(w.iterations):
        if w.formed:
            times_formed(w)
        else:
            times_A(w)
        if descend(w, w.K_lanes) == 0:
            break
    save(w.found, w.out, (w.BATCH, j, w.t), (0, w.K))


zeros, load_vector = registers(1)  # a product is rounded before it is added: equal rows leave 0


@piece(of="exact")
def factor(w: Work):
    """L U = Z + diag(ridge) with its rows in the order of `pivots`: upper = U and more below it, lower = 1 - L."""
    A, L, K = w.upper, w.lower, w.K
    load(w.in_r, (w.BATCH, w.HEAD, w.t), (0, K), w.ridge)
    for i in range(K):
        copy_row(row(w.S, i), row(A, i), K)
        A[i, i] += w.ridge[0, i]
        w.pivots[i] = i
    for j in range(K - 1):
        at = j
        for i in range(j + 1, K):
            at = i if abs(A[i, j]) > abs(A[at, j]) else at
        if at != j:
            exchange(row(A, j), row(A, at))
            exchange(row(L, j), row(L, at))
            w.pivots[j], w.pivots[at] = w.pivots[at], w.pivots[j]
        first = (j + 1) // w.lane * w.lane
        n, pivot = w.K_lanes - first, row(columns(A, first, w.K_lanes - first), j)
        for i in range(j + 1, K):
            f, rest = -A[i, j] / A[j, j], row(columns(A, first, n), i)
            for d in range(0, n, BYTES // A.itemsize):
                store(load_vector(rest, d) + fma(f, load_vector(pivot, d), zeros(A)), rest, d)
            L[i, j] = f


@piece(of="exact")
def exchange(x: Vector, y: Vector):
    """Exchange two rows."""
    for d in range(len(x)):
        x[d], y[d] = y[d], x[d]


@piece(of="exact")
def solve_exactly(w: Work, j: Whole):
    """x of query head j, from x L U = q; the flag is set where x is not finite, because a pivot was 0."""
    load_queries(w, j)
    K = w.K
    scaled(w.q, None, w.residual)
    x = row(w.residual, 0)
    for i in range(K):
        u = row(w.upper, i)
        x[i] = x[i] / u[i]
        for d in range(i + 1, K):
            x[d] -= x[i] * u[d]
    for n in range(K):
        i = K - 1 - n
        below = row(w.lower, i)
        for d in range(i):
            x[d] += x[i] * below[d]
    for i in range(K):
        w.found[0, w.pivots[i]] = x[i]
        if x[i] - x[i] != 0:
            tokens_of(w.flag, w.scale, (0, 0, 0), 1, (0, 1))[0, 0] = 1
    save(w.found, w.out, (w.BATCH, j, w.t), (0, K))
