"""The systems of a SOLVED read-out by conjugate gradients in compiled loops: readouts/systems.py's `iterated`.

The forward kernel writes the solutions where other calls have what queries read.

    x_t (Z_t + diag(ridge_t)) = q_t, Z_t the sum of the keys' outer products: rows of a chunk step together, and
    p A_i = p^_i Z + sum_{j <= i} gram(p, k)_ij beta_j k_j + ridge_i (.) p_i

Of a sequence of one token Z_t is formed first, Z_t = e^g Z + k^T beta k, in rows of whole blocks of columns, which stay
in the cache: a step is then one pass over it and two over vectors.
"""

from __future__ import annotations

from ...ops.cpu.numbers import number
from ...ops.cpu.products import LEFT_LOWER, OUT_LOWER, product
from ...ops.cpu.rows import add_hadamard, clear, scaled
from ...ops.cpu.storage import load, save
from ...runtime.pieces.passes import WIDE, apply_narrow, apply_wide
from ...runtime.pieces.piece import Number, Vector, Whole, piece
from ...runtime.pieces.tiles import dot
from ...runtime.pieces.vectors import BYTES
from ...runtime.pieces.views import columns, row
from .chunk import load_queries, read_state
from .decay import weigh
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


@piece(of="formed")
def times_formed(w: Work):
    """times_A = p (Z + diag(ridge)) of one row, and its product with p."""
    S, P, out, ridge, column, n = w.S, w.direction, w.times_A, w.ridge, 0, w.K_lanes
    p, curve, wide = row(P, 0), number(S, 0), WIDE * (BYTES // S.itemsize)
    while column < n:
        count = wide if n - column >= wide else w.lane
        A, own, to, diagonal = (columns(S, column, count), row(columns(P, column, count), 0),
                                row(columns(out, column, count), 0), row(columns(ridge, column, count), 0))  # fmt: skip
        curve += apply_wide(A, p, own, diagonal, to) if count == wide else apply_narrow(A, p, own, diagonal, to)
        column += count
    w.curve = curve


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
            curve = w.curve if w.formed else dot(p, pA, n)
            step = before / curve if curve != 0 else before
            move(step, p, row(w.found, i))
            move(-step, pA, r)
            after = dot(r, r, n)
            turn(after / before, r, p)
            w.squares[i] = after
            if not after <= limit:
                left += 1
    return left


@piece
def move(step: Number, p: Vector, x: Vector):
    """x += step p"""
    for d in range(len(x)):
        x[d] += step * p[d]


@piece
def turn(ratio: Number, r: Vector, p: Vector):
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
