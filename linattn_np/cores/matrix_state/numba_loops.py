"""The chunk form in compiled loops, for NumPy arrays: programs and tables go in, threads share out the heads."""

from __future__ import annotations

from math import prod

import numpy as np

from ...ground import threads
from ...ground.namespace import cast, sum_to
from ..kinds import Erase, Row
from ..numba_machine import SHARED, carry_out
from ..numba_program import CHUNKS, COLUMN, HEAD, WIDTH, Program
from . import COMPILED_CHUNK, chunks, numba_short
from .inputs import Inputs, Plan, Saved
from .numba_backward import backward_program
from .numba_chunk import Cell
from .numba_forward import forward_program
from .numba_table import (
    IN_DOUT,
    IN_DSTATE,
    IN_Q,
    IN_READ,
    IN_STATE,
    IN_V,
    OUT,
    OUT_DBETA,
    OUT_DBONUS,
    OUT_DG,
    OUT_DK,
    OUT_DPUSH,
    OUT_DQ,
    OUT_DREAD,
    OUT_DSTATE,
    OUT_DV,
    OUT_STATE,
    Table,
    memory,
    sequences,
)

BLOCK = 32  # value columns: a state is shared out in multiples of it
FEW_OPERATIONS = 2e6  # below, threads cost more than they give


def forward(x: Inputs, plan: Plan, state: np.ndarray | None) -> tuple[np.ndarray | None, np.ndarray, Saved]:
    """(out, final state, saved)."""
    if not (x.v.size and x.k.size):  # nothing to walk over
        return chunks.forward(x, plan, state)
    (*lead, T, H, V), dtype, table = x.v.shape, np.dtype(plan.dtype), Table(x)
    C = _chunk(plan, T)
    rows = sequences(plan, prod(lead), C)
    out = None if x.q is None else np.empty((*lead, T, table.asking, V), dtype)
    ragged = not plan.sequences or plan.sequences[0].row is not None
    if state is not None and numba_short.in_place(x, plan, state):
        end = state
    else:
        end = np.empty((*([len(rows)] if ragged else lead), H, x.k.shape[-1], V), dtype)
    table.tokens(OUT, out, table.asking)
    table.states(IN_STATE, state)
    table.states(OUT_STATE, end)
    stepwise = numba_short.is_stepwise(x, plan, rows)
    if stepwise.any():
        numba_short.run(x, plan, table, state, rows[stepwise])
    if not stepwise.all():
        _forward_chunks(x, plan, table, rows[~stepwise], C, state is not None)
    return None if out is None else cast(plan.xp, out, x.v.dtype), end, Saved(x, plan, state, None)


again = numba_short.again


def _forward_chunks(x: Inputs, plan: Plan, table: Table, rows: np.ndarray, C: int, started: bool) -> None:
    """The sequences in `rows`, chunk by chunk."""
    H, V = x.v.shape[-2:]
    columns = _columns(V, len(rows) * H)
    cell = _cell(x, plan, table, C, columns, started)
    tasks = _tasks(rows, np.arange(H), V, columns)
    run(forward_program(cell), plan, table, tasks, 6.0 * _tokens(rows) * H * cell.K * V)


def walks_tokens(x: Inputs, plan: Plan) -> bool:
    """Whether all sequences of a call are walked token by token."""
    return bool(numba_short.is_stepwise(x, plan, sequences(plan, 1, 1)).all())


def backward(saved: Saved, dout: np.ndarray | None, dstate: np.ndarray | None) -> tuple[Inputs, np.ndarray]:
    """Gradients of every input, in the dtype of the computation, and of the initial state."""
    x, plan, state, _ = saved
    if not (x.v.size and x.k.size) or numba_short.is_only_stepwise(x):
        _, _, kept = chunks.forward(x, plan, state)
        return chunks.backward(kept, dout, dstate)
    (*lead, T, H, V), dtype, table = x.v.shape, np.dtype(plan.dtype), Table(x)
    C, asked = _chunk(plan, T), x.q is not None and dout is not None
    rows = sequences(plan, prod(lead), C)
    ragged = not plan.sequences or plan.sequences[0].row is not None
    dS = np.empty((*([len(rows)] if ragged else lead), H, x.k.shape[-1], V), dtype)
    grads = _gradients(x, plan, table, asked, len(rows))
    table.states(IN_STATE, state)
    table.states(IN_DSTATE, dstate)
    table.states(OUT_DSTATE, dS)
    if asked:
        table.tokens(IN_DOUT, dout, table.asking)
    cell = _cell(x, plan, table, C, V, state is not None)._replace(asked=asked)
    group = int(table.numbers[:, SHARED].max())
    program = backward_program(cell, group, int(rows[:, CHUNKS].max(initial=0)), dstate is not None)
    tasks = _tasks(rows, np.arange(0, H, group), V, V)
    run(program, plan, table, tasks, 16.0 * _tokens(rows) * H * cell.K * V)
    summed = {name: sum_to(plan.xp, d, getattr(x, name).shape) for name, d in grads.items()}
    return Inputs(**{name: summed.get(name) for name in Inputs._fields}), dS


def _gradients(x: Inputs, plan: Plan, table: Table, asked: bool, count: int) -> dict[str, np.ndarray]:
    """Arrays for the gradients by input, with all batch rows, put into the table."""
    dtype, lead, made = np.dtype(plan.dtype), x.v.shape[:-3], {}
    for name, row in (("q", OUT_DQ), ("k", OUT_DK), ("v", OUT_DV), ("g", OUT_DG), ("r", OUT_DREAD),
                      ("beta", OUT_DBETA), ("a", OUT_DREAD), ("b", OUT_DPUSH)):  # fmt: skip
        y = getattr(x, name)
        if y is not None:
            make = np.zeros if name == "q" and not asked else np.empty
            made[name] = make((*lead, *y.shape[-3:]), dtype)
            table.tokens(row, made[name], table.asking if name == "q" else table.H)
    if x.u is not None:
        made["u"] = np.zeros((count, *x.u.shape), dtype)
        table.tokens(OUT_DBONUS, made["u"], table.H)
    return made


def _chunk(plan: Plan, T: int) -> int:
    """Tokens of a chunk, no more than there are."""
    C = plan.chunk_size
    return max(1, min(C if isinstance(C, int) and C > 1 else COMPILED_CHUNK, T))


def _columns(V: int, states: int) -> int:
    """Value columns of a task: all, or fewer where there are fewer states than threads."""
    share = -(-threads.num_threads() // max(states, 1))
    return min(V, max(1, -(-V // (share * BLOCK))) * BLOCK) if share > 1 else V


def _cell(x: Inputs, plan: Plan, table: Table, C: int, columns: int, started: bool) -> Cell:
    """The kind of a call."""
    dtype = np.dtype(plan.dtype)
    direct = table.direct((IN_Q, IN_V, IN_READ), dtype, 64 // dtype.itemsize)
    free = x.erase is Erase.FREE
    return Cell(
        dtype.name, x.k.shape[-1], columns, C, x.decay, x.erase, plan.query_row is Row.BEFORE,
        free or plan.erase_row is Row.BEFORE, free or x.r is not x.k, x.q is not None,
        1 if x.q is None else max(1, x.q.shape[-2] // table.H), x.u is not None, started, direct,
    )  # fmt: skip


def _tasks(rows: np.ndarray, heads: np.ndarray, V: int, columns: int) -> np.ndarray:
    """A task for each sequence, head and block of value columns, the last running fastest."""
    starts = np.arange(0, V, columns)
    table = np.repeat(rows, len(heads) * len(starts), axis=0)
    table[:, HEAD] = np.tile(np.repeat(heads, len(starts)), len(rows))
    table[:, COLUMN] = np.tile(starts, len(rows) * len(heads))
    table[:, WIDTH] = np.minimum(columns, V - table[:, COLUMN])
    return table


def _tokens(rows: np.ndarray) -> int:
    """Tokens of all sequences."""
    return int((rows[:, 2] - rows[:, 1]).sum())


def run(program: Program, plan: Plan, table: Table, tasks: np.ndarray, operations: float) -> None:
    """Carry out a program for all tasks."""
    dtype = program.dtype
    loop, code = carry_out(dtype), program.table()
    one, scale = dtype.type(1), dtype.type(plan.scale)

    def task(first: int, last: int) -> None:
        tables = program.placed(_address(memory(program.bytes))), program.registers()
        matrices, registers = map(_address, tables)
        loop(one, scale, _address(code), registers, matrices, _address(table.numbers), _address(tasks), first, last)

    threads.run(task, len(tasks), 1 if operations < FEW_OPERATIONS else threads.num_threads())


def _address(x: np.ndarray) -> int:
    return x.__array_interface__["data"][0]
