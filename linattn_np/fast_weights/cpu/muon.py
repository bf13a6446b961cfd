"""Newton-Schulz iterations and their transpose, matrix by matrix: ../muon.py has the equations.

X has n columns and no fewer rows. A = X^T X and all polynomials of it are symmetric: one half of each is computed.
Iterations of a group multiply no rows: with A_0 = A, B_i = a + b A_i + c A_i A_i and A_{i+1} = B_i A_i B_i

    X <- X Q,   Q = B_0 B_1 ...

Q is a function q of A, so that from the cotangent Z of the new X

    dX = Z Q + X D,   D = the derivative of q at A along X^T Z + Z^T X
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from ...ops.cpu.products import FULL, OUT_LOWER, product, transpose
from ...ops.cpu.rows import add, fill, overlap
from ...runtime.held import cached
from ...runtime.pieces.memory import working
from ...runtime.pieces.piece import Matrix, Whole, piece, workspace_kind
from ...runtime.pieces.run import launch_of
from ...runtime.pieces.vectors import BYTES
from ...runtime.pieces.views import columns, row, rows, transposed
from ...runtime.pieces.workspace import Layout, Workspace
from ...runtime.pieces.workspace import Matrix as M
from .memory import copy

LONGEST = 3  # iterations of a group: each multiplies the rounding errors of A by up to a^2
SQUARE, RECTANGLE = M("n", "n"), M("m", "n")
STACK = M("stack", "n")  # of one matrix for each iteration; of all matrices of a call if they are residuals
WHOLES = ("m", "n", "height", "width", "is_wide", "has_residuals", "x_at", "a_at", "iterations")
STACKS = {"X": M("row_stack", "n"), "A": STACK, "B": STACK, "Q": STACK}
MUON = Workspace("muon", WHOLES, ("margin", "e"), (), {
    "given": {"G": M("all_rows", "width"), "out": M("all_rows", "width"), "dX": M("all_rows", "width"),
              "table": M("iterations", "three"), "groups": M("group_count", dtype="int64")},
    "fresh": STACKS,
    "": {"C": SQUARE, "b": M("n"), "c": M("n")},
    "adjoint": {"Z": RECTANGLE, "T": RECTANGLE, "dA": SQUARE, "dB": SQUARE, "D": SQUARE, "U": SQUARE, "V": SQUARE},
})  # fmt: skip
Work = workspace_kind(MUON)


@piece
def mirror(A: Matrix):
    """A_ji = A_ij, i > j."""
    lane = BYTES // A.itemsize
    for i in range(0, len(A), lane):
        count = min(lane, len(A) - i)
        if i:
            transpose(columns(rows(A, i, count), 0, i), columns(rows(A, 0, i), i, count))
        for p in range(i, i + count):
            for j in range(i, p):
                A[j, p] = A[p, j]


@piece
def symmetric(X: Matrix, Y: Matrix, out: Matrix):
    """out = X Y, which is symmetric."""
    product(OUT_LOWER, X, Y, out)
    mirror(out)


@piece
def begin(w: Work, task: Whole):
    """The rows of a matrix in the stacks."""
    w.x_at = task * (len(w.groups) + 1) * w.m if w.has_residuals else 0
    w.a_at = task * w.iterations * w.n if w.has_residuals else 0


@piece
def start(w: Work, G: Matrix):
    """X_0 = G / (margin |G| + e), or its transpose."""
    X, size = rows(w.X, w.x_at, w.m), w.margin * np.sqrt(overlap(G, G)) + w.e
    if w.is_wide:
        transpose(G, X)
    else:
        copy(G, X)
    for i in range(len(X)):
        x = row(X, i)
        for j in range(len(x)):
            x[j] /= size


@piece
def polynomial(w: Work, i: Whole):
    """B_i = a + b A_i + c A_i A_i."""
    A, B = rows(w.A, w.a_at + i * w.n, w.n), rows(w.B, w.a_at + i * w.n, w.n)
    fill(w.b, w.table[i, 1])
    fill(w.c, w.table[i, 2])
    product(OUT_LOWER, A, A, B, w.c, A, w.b)
    for j in range(w.n):
        B[j, j] += w.table[i, 0]
    mirror(B)


@piece
def iterate(w: Work):
    """X_{g+1} = X_g Q_g for every group g, from X_0."""
    n, first = w.n, 0
    for g in range(len(w.groups)):
        X, last = rows(w.X, w.x_at + g * w.m, w.m), first + w.groups[g] - 1
        symmetric(transposed(X), X, rows(w.A, w.a_at + first * n, n))
        for i in range(first, last + 1):
            polynomial(w, i)
            A, B, Q = rows(w.A, w.a_at + i * n, n), rows(w.B, w.a_at + i * n, n), rows(w.Q, w.a_at + i * n, n)
            if i == first:
                copy(B, Q)
            else:
                symmetric(rows(w.Q, w.a_at + (i - 1) * n, n), B, Q)
            if i < last:
                symmetric(A, B, w.C)
                symmetric(w.C, B, rows(w.A, w.a_at + (i + 1) * n, n))
        product(FULL, X, rows(w.Q, w.a_at + last * n, n), rows(w.X, w.x_at + (g + 1) * w.m, w.m))
        first = last + 1


@piece
def forward(w: Work, first: Whole, last: Whole):
    """The matrices first..last."""
    for task in range(first, last):
        G, out = rows(w.G, task * w.height, w.height), rows(w.out, task * w.height, w.height)
        begin(w, task)
        start(w, G)
        iterate(w)
        X = rows(w.X, w.x_at + len(w.groups) * w.m, w.m)
        if w.is_wide:
            transpose(X, out)
        else:
            copy(X, out)


@piece
def add_transposed(A: Matrix, out: Matrix):
    """out = A + A^T"""
    transpose(A, out)
    add(A, out)


@piece
def step_along(w: Work, i: Whole):
    """dB = b dA + c (dA A_i + A_i dA)."""
    fill(w.b, w.table[i, 1] / 2)
    fill(w.c, w.table[i, 2])
    product(FULL, w.dA, rows(w.A, w.a_at + i * w.n, w.n), w.V, w.c, w.dA, w.b)
    add_transposed(w.V, w.dB)


@piece
def along(w: Work, first: Whole, last: Whole):
    """D = the derivative of Q along dA, the iterations first..last."""
    n = w.n
    for i in range(first, last + 1):
        A, B = rows(w.A, w.a_at + i * n, n), rows(w.B, w.a_at + i * n, n)
        step_along(w, i)
        if i == first:
            copy(w.dB, w.D)
        else:  # D <- D B + Q dB
            product(OUT_LOWER, w.D, B, w.U)
            product(OUT_LOWER, rows(w.Q, w.a_at + (i - 1) * n, n), w.dB, w.U, added=w.U)
            mirror(w.U)
            copy(w.U, w.D)
        if i < last:  # dA <- dB C + C dB + B dA B, C = A B
            symmetric(A, B, w.C)
            product(FULL, w.dB, w.C, w.V)
            add_transposed(w.V, w.U)
            product(FULL, B, w.dA, w.V)
            product(OUT_LOWER, w.V, B, w.dA, added=w.U)
            mirror(w.dA)


@piece
def backward(w: Work, first: Whole, last: Whole):
    """Where G is 0, X is linear in it: dX / e."""
    for task in range(first, last):
        at = task * w.height
        G, d, out = rows(w.G, at, w.height), rows(w.dX, at, w.height), rows(w.out, at, w.height)
        begin(w, task)
        if not w.has_residuals:
            start(w, G)
            iterate(w)
        if w.is_wide:
            transpose(d, w.Z)
        else:
            copy(d, w.Z)
        first_of = w.iterations
        for back in range(len(w.groups)):
            g = len(w.groups) - 1 - back
            X, end = rows(w.X, w.x_at + g * w.m, w.m), first_of - 1
            first_of -= w.groups[g]
            product(FULL, transposed(X), w.Z, w.dB)
            add_transposed(w.dB, w.dA)
            along(w, first_of, end)
            product(FULL, w.Z, rows(w.Q, w.a_at + end * w.n, w.n), w.T)
            product(FULL, X, w.D, w.Z, added=w.T)
        if w.is_wide:
            transpose(w.Z, out)
        else:
            copy(w.Z, out)
        length = np.sqrt(overlap(G, G))
        size = w.margin * length + w.e
        share = w.margin * overlap(G, out) / (length * size) if length > 0 else 0.0
        for i in range(len(out)):
            x, to = row(G, i), row(out, i)
            for j in range(len(to)):
                to[j] = (to[j] - share * x[j]) / size


def newton_schulz(
    G: np.ndarray, table: Any, margin: float, e: float, dX: Any = None, residuals: Any = None, keep: bool = False
) -> tuple[np.ndarray, Any]:
    """(the last X of matrices (..., height, width), or dG of its cotangent dX; keep: what the latter may read)."""
    (height, width), tasks, kind = G.shape[-2:], prod(G.shape[:-2]), G.dtype
    m, n, count = max(height, width), min(height, width), len(table)
    longest = LONGEST if m >= 2 * n else 1
    groups = np.array([min(longest, count - i) for i in range(0, count, longest)], np.int64)
    each = tasks if keep or residuals else 1
    sizes = {"m": m, "n": n, "height": height, "width": width, "iterations": count, "three": 3,
             "group_count": len(groups), "all_rows": tasks * height, "stack": each * count * n,
             "row_stack": each * (len(groups) + 1) * m}  # fmt: skip
    if keep:
        residuals = {name: working((sizes[STACKS[name].rows], n), kind) for name in STACKS}
    out = working(G.shape, kind)
    arrays = {"G": G, "out": out} | ({} if dX is None else {"dX": dX})
    values = {"is_wide": int(height < width), "has_residuals": int(bool(residuals)), "margin": margin, "e": e,
              "groups": groups, "table": np.array(table, kind)} | (residuals or {})  # fmt: skip
    values |= {name: np.ascontiguousarray(y).reshape(-1, width) for name, y in arrays.items()}
    words = frozenset(["adjoint"] * (dX is not None) + ["fresh"] * (not residuals))
    is_small = 6.0 * tasks * count * m * n * n < FEW_OPERATIONS
    bounds, each = ([0, tasks], tasks) if is_small else (list(range(tasks + 1)), 1)
    launch_of(forward if dX is None else backward, MUON, kind.name, layout(kind.name, tuple(sizes.items()), words),
              values, words, bounds, each).run()  # fmt: skip
    return out, residuals


FEW_OPERATIONS = 2e6  # below, threads cost more than they give


@cached
def layout(dtype: str, sizes: tuple[tuple[str, int], ...], words: frozenset[str]) -> Layout:
    """The table of a kind of call, with the matrices of a thread's own memory."""
    return MUON.layout(dict(sizes), dtype, words)
