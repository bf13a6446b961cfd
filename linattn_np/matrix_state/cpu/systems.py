"""The systems of a SOLVED read-out by conjugate gradients in compiled loops: readouts/systems.py's `iterated`.

    x_t (Z_t + diag(ridge_t)) = q_t, Z_t the sum of the keys' outer products: rows of a chunk step together, and
    p A_i = p^_i Z + sum_{j <= i} gram(p, k)_ij beta_j k_j + ridge_i (.) p_i
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np

from ...core import StatesAt
from ...ops.conjugate_gradients import square_of
from ...ops.cpu.products import FULL, LEFT_LOWER, OUT_LOWER, product
from ...ops.cpu.programs import Places
from ...ops.cpu.rows import add_hadamard, clear, scaled
from ...ops.cpu.storage import load, save
from ...runtime.pieces.piece import Number, Vector, Whole, piece
from ...runtime.pieces.row_tiles import dot
from ...runtime.pieces.views import row, rows
from ...runtime.tracing import Trace
from .. import policy
from ..readouts.systems import Solver
from ..types import Inputs, Plan
from .chunk import begin_chunk, begin_task, load_queries, load_tokens, once, reach, write
from .chunks import cell_of, kernel_of, run, tokens
from .decay import decays, weigh
from .forward import load_state, save_state
from .layout import layout
from .recurrent.systems import solve_token
from .replay import run_chunks, sources_of
from .table import AT, BATCH, FIRST, STATE, Table, count_sequences, lengths, sequences
from .time_blocks import time_blocks
from .workspace import Work


@piece
def times_A(w: Work):
    """times_A = p A of the rows p = direction."""
    product(OUT_LOWER, w.direction, w.kT, w.P)
    weigh(w.P, w.E, False, w.ones)
    product(LEFT_LOWER, w.P, w.v, w.times_A)
    reach(w, 0, w.ones, 1.0)
    product(FULL, w.direction, w.S, w.times_A, w.factor, w.times_A)
    if w.each_ridge:
        add_hadamard(w.direction, w.ridge, w.times_A)
    else:
        ridge = row(w.ridge, 0)
        for i in range(w.c):
            p, to = row(w.direction, i), row(w.times_A, i)
            for d in range(len(to)):
                to[d] += p[d] * ridge[d]


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


@piece
def solve_rows(w: Work, j: Whole):
    """x from 0, for the rows of query head j."""
    load_queries(w, j)
    clear(w.found)
    scaled(w.q, None, w.residual)
    scaled(w.q, None, w.direction)
    for i in range(w.c):
        w.squares[i] = dot(row(w.q, i), row(w.q, i), w.K_lanes)
        w.bounds[i] = w.enough * w.squares[i]
    for _ in range(w.iterations):
        times_A(w)
        if descend(w, w.K_lanes) == 0:
            break
    save(w.found, w.out, (w.BATCH, j, w.t), (0, w.K))


@piece
def solve_systems(w: Work, first: Whole, last: Whole):
    """Solutions and the final state of the tasks first..last."""
    once(w)
    for n in range(first, last):
        begin_task(w, n)
        if not w.EARLIER:  # else S is where the segment before ended
            load_state(w, w.in_state, w.STATE, w.S, w.started)
        if not w.each_ridge:
            load(w.in_r, (w.BATCH, w.HEAD, 0), (0, w.K), rows(w.ridge, 0, 1))
        w.t = w.FIRST
        while w.t < w.STOP:
            begin_chunk(w)
            load_tokens(w)
            decays(w)
            if w.each_ridge:
                load(w.in_r, (w.BATCH, w.HEAD, w.t), (0, w.K), w.ridge)
            for j in range(w.HEAD * w.queries, (w.HEAD + 1) * w.queries):
                solve_rows(w, j)
            write(w, w.S, w.S)
            w.t += w.c
        if w.AT:
            save_state(w, w.S, w.out_states, w.AT - 1)
        if not w.LATER:
            save_state(w, w.S, w.out_state, w.STATE)


class Systems:
    """The systems of a call: all but where its arrays lie."""

    def __init__(self, x: Inputs, ridge: np.ndarray, solver: Solver, plan: Plan, Z: np.ndarray | None):
        (*lead, T, H, K), dtype = x.v.shape, np.dtype(plan.dtype)
        self.table = table = Table(x._replace(r=ridge))
        self.rows = sequences(plan, prod(lead), policy.cpu_chunk(plan, T))
        self.single = lengths(self.rows) == 1
        rows = self.rows[~self.single]
        self.found = np.empty((*lead, T, table.query_heads, K), dtype)
        ended = [count_sequences(self.rows)] if plan.is_ragged else lead
        self.end, self.at = np.empty((*ended, H, K, K), dtype), None
        if plan.states_at is not None:
            self.at = np.empty((*(() if plan.is_ragged else lead), len(plan.states_at), H, K, K), dtype)
        table.tokens("out", self.found, table.query_heads)
        table.states("in_state", Z)
        table.states("out_state", self.end)
        table.states("out_states", self.at)
        cell = cell_of(x, plan, table, K, Z is not None)
        cell = cell._replace(iterations=solver.iterations, each_ridge=ridge.shape[-3] > 1)
        self.tasks, self.bounds = time_blocks(rows, H, K, K, cell.C, 1)
        self.operations = 2.0 * solver.iterations * tokens(rows) * table.query_heads * K * (K + cell.C)
        numbers = {"scale": plan.scale, "enough": square_of(solver.tolerance, float(np.finfo(dtype).eps))}
        self.kernel = kernel_of(solve_systems, cell, layout(cell)[0], table, numbers)

    def run(self, numbers: np.ndarray, owners: Any) -> None:
        """Solutions and final state, where the table says; `owners` keeps its arrays alive."""
        run(self.kernel, numbers, self.tasks, self.bounds, self.operations, owners)

    def run_single(self, x: Inputs, ridge: np.ndarray, solver: Solver, plan: Plan, Z: np.ndarray | None) -> None:
        """Those of sequences of one token, by their own form."""
        rows, each = self.rows[self.single], lambda y: y.reshape(-1, *y.shape[-3:])
        t, batch = rows[:, FIRST], rows[:, BATCH]

        def chosen(y: np.ndarray) -> np.ndarray:
            y = each(y)
            return y[batch if len(y) > 1 else 0, t if y.shape[1] > 1 else 0][:, None]

        read, end = solve_token(Inputs(*(None if y is None else chosen(y) for y in x)),
                                chosen(ridge) if ridge.shape[-3] > 1 else ridge, solver, plan,
                                None if Z is None else each(Z)[rows[:, STATE]])  # fmt: skip
        each(self.found)[batch, t] = read[:, 0]
        each(self.end)[rows[:, STATE]] = end
        if self.at is not None:
            each(self.at)[rows[rows[:, AT] > 0, AT] - 1] = end[rows[:, AT] > 0]


def solve(
    x: Inputs, ridge: np.ndarray, solver: Solver, plan: Plan, Z: np.ndarray | None
) -> tuple[np.ndarray, Any]:
    """(x_t, Z after the last token), as readouts/systems.py's; with positions above 0 a StatesAt of it."""
    if is_one_token(x, plan) and plan.states_at is None:
        return solve_token(x, ridge, solver, plan, Z)
    systems = Systems(x, ridge, solver, plan, Z)
    if systems.single.any():
        systems.run_single(x, ridge, solver, plan, Z)
    if not systems.single.all():
        systems.run(systems.table.numbers, systems.table)
    return systems.found, systems.end if systems.at is None else StatesAt(systems.end, systems.at)


def is_one_token(x: Inputs, plan: Plan) -> bool:
    """Whether every sequence of a call that is not ragged has one token."""
    return x.v.shape[-3] == 1 and not plan.is_ragged


def record_solve(
    keys: tuple[Inputs, np.ndarray], solver: Solver, plan: Plan, Z: np.ndarray | None, trace: Trace
) -> Callable[..., Any]:
    """`solve` for other arrays in place of trace.given: (arrays, Z) -> (x_t, Z after the last token).

    keys: the memory and the ridge, views of given arrays. Not for calls of one token.
    """
    systems = Systems(*keys, solver, plan, Z)
    own = {"out_state": systems.end, "out": systems.found} | ({} if Z is None else {"in_state": Z})
    numbers = systems.table.numbers.copy()
    run = run_chunks(systems, numbers, sources_of(numbers, Places(trace), len(trace.given), own), 0, (None, None))
    shape, ended, dtype, kept = systems.found.shape, systems.end.shape, systems.found.dtype, systems.table.kept
    systems.table, systems.found, systems.end = None, None, None

    def call(arrays: list[np.ndarray], Z: np.ndarray | None, owners: Any = kept) -> Any:
        found, end = np.empty(shape, dtype), np.empty(ended, dtype)
        given = [*arrays, end, found] if Z is None else [*arrays, end, found, Z]
        return (found, end) if run(None, given) else None

    return call
