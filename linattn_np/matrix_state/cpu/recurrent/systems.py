"""The systems of a SOLVED read-out for sequences of one token, by conjugate gradients on the formed matrix.

    Z = e^g Z_0 + k^T beta k        x (Z + diag(ridge)) = q

A task is the state of one head: its new Z in dense aligned rows, which stay in the cache, then the steps of each query.
A step is one pass over Z and two over vectors.
"""

from __future__ import annotations

import functools
from math import prod
from typing import Any

import numpy as np

from ....ops.conjugate_gradients import square_of
from ....ops.cpu.numbers import exp, number
from ....ops.cpu.rows import clear
from ....runtime import threads
from ....runtime.pieces.descent import aligned, apply_narrow, apply_wide
from ....runtime.pieces.memory import first_byte
from ....runtime.pieces.passes import NARROW, WIDE
from ....runtime.pieces.piece import Matrix as Rows
from ....runtime.pieces.piece import Number, Whole, entry, load_pieces, piece, workspace_kind
from ....runtime.pieces.row_tiles import copy_row, dot
from ....runtime.pieces.run import call_of, put, scratch
from ....runtime.pieces.vectors import lane
from ....runtime.pieces.views import columns, row, rows
from ....runtime.pieces.workspace import Matrix, Workspace, up
from ....runtime.tracing import Kernel, traced
from ...readouts.solved import broadcast_heads
from ...readouts.systems import Solver
from ...types import Inputs, Plan
from ..systems import move, turn

DIAGONAL, P, PA, R, X, OWN = range(6)  # rows of own memory behind those of Z; OWN: how many
M = Matrix
GIVEN = {"q": M("q_rows", "K"), "k": M("count", "K"), "written": M("count", "K"), "g": M("count", "one"),
         "ridge": M("ridge_rows", "K"), "Z": M("Z_rows", "K"), "own": M("own_rows", "K_whole"),
         "end": M("Z_rows", "K"), "x": M("q_rows", "K")}  # fmt: skip
SYSTEM = Workspace("system", ("count", "q_rows", "ridge_rows", "Z_rows", "own_rows", "K", "K_whole", "one",
                              "queries", "iterations", "started", "wide", "narrow"), ("enough",), (), {"": GIVEN})
Work = workspace_kind(SYSTEM)
PLACES = tuple(SYSTEM.slots[name] for name in GIVEN)


@piece
def form(w: Work, n: Whole, A: Rows):
    """A = Z of state n, with zeros behind its columns; it is saved too."""
    k, written, decay = row(w.k, n), row(w.written, n), exp(w.g[n, 0])
    clear(A)
    for i in range(w.K):
        to, f = row(A, i), k[i]
        if w.started:
            Z = row(w.Z, n * w.K + i)
            for j in range(len(written)):
                to[j] = decay * Z[j]
        for j in range(len(written)):
            to[j] += f * written[j]
        copy_row(to, row(w.end, n * w.K + i), w.K)


@piece
def times_A(w: Work, own: Rows) -> Number:
    """p (A + diag(ridge)) into own memory, and its product with p."""
    column, p = 0, row(own, w.K + P)
    curve = number(p, 0)
    while column < w.K_whole:
        wide = w.K_whole - column >= w.wide
        block = columns(own, column, w.wide if wide else w.narrow)
        A, diagonal, here, out = (rows(block, 0, w.K), row(block, w.K + DIAGONAL), row(block, w.K + P),
                                  row(block, w.K + PA))  # fmt: skip
        if wide:
            curve += apply_wide(A, p, here, diagonal, out)
        else:
            curve += apply_narrow(A, p, here, diagonal, out)
        column += block.shape[1]
    return curve


@piece
def descend(w: Work, j: Whole, own: Rows):
    """The solution for query row j, from 0.

    a = |r|^2 / <p, p A>, x += a p, r' = r - a p A, p' = r' + b p, b = |r'|^2 / |r|^2
    """
    p, pA, r, x = row(own, w.K + P), row(own, w.K + PA), row(own, w.K + R), row(own, w.K + X)
    copy_row(row(w.q, j), p, w.K)
    copy_row(p, r, w.K_whole)
    for d in range(w.K_whole):
        x[d] = 0
    square = dot(r, r, w.K_whole)
    bound = w.enough * square
    for _ in range(w.iterations):
        if square <= bound:  # a row that is not a number goes on
            break
        curve = times_A(w, own)
        step = square / curve if curve != 0 else square
        move(step, p, x)
        move(-step, pA, r)
        after = dot(r, r, w.K_whole)
        turn(after / square, r, p)
        square = after
    copy_row(x, row(w.x, j), w.K)


@piece
def solve_tokens(w: Work, first: Whole, last: Whole):
    """Solutions and final states of the tasks first..last."""
    own = aligned(w.own)
    for n in range(first, last):
        form(w, n, rows(own, 0, w.K))
        copy_row(row(w.ridge, n % w.ridge_rows), row(own, w.K + DIAGONAL), w.K)
        for j in range(n * w.queries, (n + 1) * w.queries):
            descend(w, j, own)


def solve_token(x: Inputs, ridge: Any, solver: Solver, plan: Plan, Z: Any, overwrite: bool = False) -> tuple[Any, Any]:
    """(x_t, Z after it) of calls of one token, as readouts/systems.py's; of traced arrays too.

    overwrite: Z, in C order and traced, is overwritten.
    """
    (*lead, _, H, K), dtype, trace = x.v.shape, np.dtype(plan.dtype), traced(x.v)
    heads = max(H, x.q.shape[-2])

    def dense(y: Any) -> Any:
        return np.ascontiguousarray(y, dtype) if trace is None else trace.dense(y, dtype)

    def rows_of(y: Any, count: int) -> Any:
        y = broadcast_heads(y, count)
        y = y if y.shape[:-3] == tuple(lead) else np.broadcast_to(y, (*lead, *y.shape[-3:]))
        return dense(y).reshape(-1, y.shape[-1])

    new, count = np.empty if trace is None else trace.new, prod(lead) * H
    begin = Z if Z is None or overwrite else dense(Z)
    found, end = new((*lead, 1, heads, K), dtype), Z if overwrite else new((*lead, H, K, K), dtype)
    given = [rows_of(x.q, heads), *(rows_of(y, H) for y in (x.k, x.v, x.g)), dense(ridge).reshape(-1, K),
             end if begin is None else begin]  # fmt: skip
    known, own_shape, call = _kernel(dtype, (count, len(given[4]), K, heads // H), solver, Z is not None)
    if trace is not None:
        arrays = (*given, new(own_shape, dtype), end, found)
        table = known.copy()
        return trace.kernel(Kernel(entry(solve_tokens, dtype.name), table, PLACES, arrays, count)), trace.view(end)

    def work(first: int, last: int) -> None:
        held, place = scratch.take(prod(own_shape) * dtype.itemsize)
        table = known.copy()
        for at, y in zip(PLACES, (*given, None, end, found), strict=True):
            table[at] = place if y is None else first_byte(y)
        call(table, first, last)
        del held

    threads.run(work, count, threads.num_threads())
    return found, end


@functools.lru_cache(maxsize=64)
def _kernel(dtype: np.dtype, sizes: tuple[int, int, int, int], solver: Solver, started: bool) -> tuple[Any, Any, Any]:
    """(table without addresses, the shape of own memory, loaded kernel); sizes: count, ridge_rows, K, queries."""
    load_pieces((solve_tokens,), dtype.name)
    (count, ridge_rows, K, queries), W = sizes, lane(dtype)
    whole, own = up(K, NARROW * W), K + OWN + 1
    table = put(SYSTEM, np.zeros(SYSTEM.size, np.int64), {
        "count": count, "q_rows": count * queries, "ridge_rows": ridge_rows, "Z_rows": count * K, "own_rows": own,
        "K": K, "K_whole": whole, "one": 1, "queries": queries, "iterations": solver.iterations, "started": started,
        "wide": WIDE * W, "narrow": NARROW * W, "enough": square_of(solver.tolerance, float(np.finfo(dtype).eps))})
    for name, m in GIVEN.items():
        table[SYSTEM.slots[name] + 1] = {"K": K, "K_whole": whole, "one": 1}[m.columns] * dtype.itemsize
    return table, (own, whole), call_of(solve_tokens, SYSTEM, dtype.name)
