"""The systems of a SOLVED read-out by conjugate gradients in compiled loops: systems.py's `iterated`, as a program."""

from __future__ import annotations

import functools
from math import prod

import numpy as np

from ...ops.conjugate_gradients import square_of
from ...runtime.compiled.tiles import LEFT_LOWER, OUT_LOWER
from .. import policy
from ..readouts.systems import Solver
from ..types import Inputs, Plan
from .chunk import Cell, Chunk
from .chunks import cell_of, tokens
from .interpreter.program import COLUMN, FIRST, HEAD, ONE, SCALE, STATE, STOP, WIDTH, Program
from .run import run
from .strips import strips
from .table import IN_Q, IN_READ, IN_STATE, OUT, OUT_STATE, Table, sequences


class Systems(Chunk):
    """A chunk of the memory of keys, and the rows that are solved for; SCALE is the square of the tolerance."""

    def __init__(self, p: Program, cell: Cell, each_token: bool):
        super().__init__(p, cell)
        C, K = cell.C, cell.K
        self.found, self.residual, self.direction, self.pA = (p.matrix(C, K) for _ in range(4))
        self.rr, self.enough = p.vector(C), p.vector(C)
        self.n, self.going, self.zero, self.each_token = p.register(), p.register(), p.literal(0), each_token
        ridge = p.matrix(C if each_token else 1, K)
        self.ridge, self.ridge_row = ridge, ridge if each_token else p.same(ridge)

    def load_ridge(self) -> None:
        """Of the chunk's tokens, or of all."""
        start, count = (self.t, self.c) if self.each_token else (self.zero, self.one)
        self.p.load(self.ridge, IN_READ, start, HEAD, count, self.zero, self.K)

    def times_A(self, Z: int) -> None:
        """pA_i = p^_i Z + sum over j <= i of gram(p, k)_ij beta_j k_j + ridge_i (.) p_i"""
        p, c, K = self.p, self.c, self.K
        p.multiply(self.direction, self.kT, c, c, K, self.P, ONE, OUT_LOWER)
        p.weigh(self.P, self.E, c, self.whole, False, ONE)
        p.multiply(self.P, self.v, c, K, c, self.pA, ONE, LEFT_LOWER)
        p.multiply(self.direction, Z, c, K, K, self.pA, self.reach(False, ONE), added=self.pA, added_rows=ONE)
        p.add_hadamard(self.direction, self.ridge_row, c, K, self.pA)

    def solve_rows(self, Z: int, j: int, iterations: int) -> None:
        """x from 0, for the rows of query head j."""
        p, c, K = self.p, self.c, self.K
        b = self.take(IN_Q, self.cell.K, j)
        p.clear(self.found, self.zero, c, K)
        p.clear(self.rr, self.zero, c, self.one)
        p.copy(b, c, K, self.residual, ONE)
        p.copy(b, c, K, self.direction, ONE)
        p.dots(self.rr, b, b, c, K, 1)
        p.reach(self.enough, self.rr, SCALE, c, 1)
        p.add(self.n, self.zero, self.zero)
        top = p.here()
        self.times_A(Z)
        p.descend(self.found, self.residual, self.direction, self.pA, self.rr, self.enough, c, K, self.going)
        p.add(self.n, self.n, self.one)
        with p.only_if(self.zero, self.going):
            p.less(self.n, p.literal(iterations), top)
        p.put(self.found, OUT, self.t, j, c, K, ONE)


@functools.lru_cache(64)
def systems_program(cell: Cell, each_token: bool, iterations: int) -> Program:
    """Solutions and the final state."""
    p = Program(cell.dtype)
    x, Z = Systems(p, cell, each_token), p.matrix(cell.K, cell.K)
    x.once()
    if cell.started:
        p.state(Z, IN_STATE, STATE, HEAD, x.K, COLUMN, WIDTH)
    else:
        p.clear(Z, x.zero, x.K, WIDTH)
    if not each_token:
        x.load_ridge()
    p.add(x.t, FIRST, x.zero)
    with p.only_if(x.t, STOP):
        top = p.here()
        x.begin()
        x.writers()
        x.decays()
        if each_token:
            x.load_ridge()
        x.each_query(lambda j: x.solve_rows(Z, j, iterations))
        x.write(Z, Z)
        p.add(x.t, x.t, x.c)
        p.less(x.t, STOP, top)
    p.store_state(Z, OUT_STATE, STATE, HEAD, x.K, COLUMN, WIDTH)
    return p


def solve(
    x: Inputs, ridge: np.ndarray, solver: Solver, plan: Plan, Z: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """(x_t, Z after the last token), as systems.py's."""
    (*lead, T, H, K), dtype, table = x.v.shape, np.dtype(plan.dtype), Table(x._replace(r=ridge))
    rows = sequences(plan, prod(lead), policy.cpu_chunk(plan, T))
    ragged = not plan.sequences or plan.sequences[0].row is not None
    found = np.empty((*lead, T, table.asking, K), dtype)
    end = np.empty((*([len(rows)] if ragged else lead), H, K, K), dtype)
    table.tokens(OUT, found, table.asking)
    table.states(IN_STATE, Z)
    table.states(OUT_STATE, end)
    cell = cell_of(x, plan, table, K, Z is not None)
    tasks, bounds = strips(rows, H, K, K, cell.C, 1)
    operations = 2.0 * solver.iterations * tokens(rows) * table.asking * K * (K + cell.C)
    program = systems_program(cell, ridge.shape[-3] > 1, solver.iterations)
    enough = square_of(solver.tolerance, float(np.finfo(dtype).eps))
    run(program, enough, table.numbers, tasks, bounds, operations, table)
    return found, end
