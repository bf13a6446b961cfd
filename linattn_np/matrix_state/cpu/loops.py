"""Compiled loops for NumPy arrays: the backward of a call, in chunks; threads share out the heads."""

from __future__ import annotations

import sys
from math import prod
from typing import Any

import numpy as np

from ...core import StatesAt
from ...ops.cpu.formulas import zeros
from ...ops.cpu.sums import sum_to
from ...runtime import threads
from ...runtime.pieces.memory import empty, working
from ...runtime.pieces.workspace import SHARED
from .. import policy
from ..array import chunks as array_chunks
from ..preprocess import backward_behind, gates_vjp
from ..types import Erase, Inputs, Plan, Saved, has_raw_gate
from .forward import (
    block_of_time,
    cell_of,
    chunk_length,
    columns_of,
    forward,
    goes_back_elsewhere,
    run,
    shares_of,
    tokens,
)
from .forward import describe as describe
from .forward import form as form
from .forward import handles as handles
from .l2norm import unit_rows as unit_rows
from .l2norm import unit_rows_vjp as unit_rows_vjp
from .scan import backward as backward_kernel
from .scan import reverse
from .solve import solve as solve
from .tasks import (
    AT,
    FIRST,
    HEAD,
    STOP,
    Cell,
    Table,
    count_sequences,
    layout,
    query_heads,
    sequences,
    state_shape,
    table_of,
    time_blocks,
)


def backward(saved: Saved, dout: np.ndarray | None, dstate: Any) -> tuple[Inputs, np.ndarray]:
    """Gradients of every input, in the dtype of the computation, and of the initial state."""
    x, plan, state, starts = saved
    if plan.l2norm or plan.beta_sigmoid:  # the kernels compute both forward (raw.py), and gates backward too
        raw = [name for name, is_so in (("l2norm", plan.l2norm), ("strengths", plan.beta_sigmoid > 0)) if is_so]
        return backward_behind(raw, sys.modules[__name__], saved, dout, dstate)
    if not (x.v.size and x.k.size) or goes_back_elsewhere(x):
        _, _, residuals = array_chunks.forward(x, plan, state)
        return array_chunks.backward(residuals, dout, dstate)
    (*lead, _, H, V), dtype, table = x.v.shape, np.dtype(plan.dtype), table_of(x, plan)
    C, has_queries = chunk_length(x, plan), x.q is not None and dout is not None
    rows, (dend, dat) = sequences(plan, prod(lead)), dstate if isinstance(dstate, StatesAt) else (dstate, None)
    count = count_sequences(rows)
    every = block_of_time(x, plan, rows, C)
    if every and starts is None:  # the forward pass has stored no states
        starts = forward(x._replace(q=None), plan._replace(gradients=True, overwrite=False), state)[2].starts
    if dat is None:
        rows[:, AT] = 0
    dS = empty((*([count] if plan.is_ragged else lead), *state_shape(x, plan)), dtype)
    grads = _gradients(x, plan, table, has_queries, count)
    table.states("in_state", state)
    table.states("in_dstate", dend)
    table.states("in_dstates", dat)
    table.states("out_dstate", dS)
    if has_queries:
        table.tokens("in_dout", dout, query_heads(x))
        table.tokens("out", None if plan.average is None else plan.average.out, query_heads(x))
    table.states("starts", starts)
    cell = cell_of(
        x if has_queries else x._replace(q=None),
        plan,
        V,
        "chunk adjoint",
        started=state is not None,
        has_dstate=dend is not None,
    )
    group, workers = int(table.numbers[:, SHARED].max()), threads.num_threads()
    each = max(1, count * H // group // workers)
    tasks, bounds = time_blocks(rows, H // group, V, V, C, each, every, last_first=True)
    tasks[:, HEAD] *= group
    operations = 16.0 * tokens(rows) * H * cell.K * V
    plain = x.erase is Erase.NONE and x.gv is x.u is None  # gradients of states between time blocks can be found before
    known = every > 0 and has_queries and plain
    apart = known and len(bounds) - 1 < min(workers, len(tasks)) and operations > policy.APART_OPERATIONS
    if apart:
        bounds = list(range(len(tasks) + 1))
        cell = cell._replace(words=cell.words | {"apart"})
        _find_ends(x, plan, table, rows, working(starts.shape, starts.dtype), cell, every)
    chunks = -(-int((tasks[:, STOP] - tasks[:, FIRST]).max(initial=1)) // C)
    shares = shares_of(tasks, bounds, operations)
    run(backward_kernel, cell, layout(cell, group, chunks), plan, table, tasks, shares)
    summed = {name: d if name == "rotation" else sum_to(d, getattr(x, name).shape) for name, d in grads.items()}
    d = Inputs(**{name: summed.get(name) for name in Inputs._fields})
    return gates_vjp(None, x, plan, d) if has_raw_gate(x, plan) else d, dS


def _find_ends(x: Inputs, plan: Plan, table: Table, rows: np.ndarray, ends: np.ndarray, cell: Cell,
               every: int) -> None:  # fmt: skip
    """Gradients of the states between time blocks, by blocks of value columns."""
    table.states("ends", ends)
    H, V = x.v.shape[-2:]
    columns = V if plan.average is not None else columns_of(V, count_sequences(rows) * H, threads.num_threads())
    tasks, bounds = time_blocks(rows, H, V, columns, cell.C, 1, every, last_first=True)
    cell = cell._replace(V=columns)
    shares = shares_of(tasks, bounds, 2.0 * tokens(rows) * H * cell.K * V)
    run(reverse, cell, layout(cell), plan, table, tasks, shares)


def _gradients(x: Inputs, plan: Plan, table: Table, has_queries: bool, count: int) -> dict[str, np.ndarray]:
    """Arrays for the gradients by input, with all batch rows, put into the table."""
    dtype, lead, grads = np.dtype(plan.dtype), x.v.shape[:-3], {}
    for name, row in (("q", "out_dq"), ("k", "out_dk"), ("v", "out_dv"), ("g", "out_dg"), ("r", "out_dr"),
                      ("beta", "out_dbeta"), ("a", "out_dr"), ("b", "out_db"), ("gv", "out_dgv"),
                      ("weight", "out_dweight"), ("own", "out_down")):  # fmt: skip
        y = None if name == "r" and plan.erases_key else getattr(x, name)  # added to dk
        if y is not None:
            make = zeros if name == "q" and not has_queries else empty
            grads[name] = make((*lead, *y.shape[-3:]), dtype)
            table.tokens(row, grads[name], query_heads(x) if name == "q" else x.v.shape[-2])
    if x.rotation is not None:
        grads["rotation"] = empty((*x.v.shape[:-1], x.rotation.shape[-1] // 2), dtype)
        table.tokens("out_dangle", grads["rotation"], x.v.shape[-2])
    for name, y in (("past_k", x.past_k), ("past_v", x.past_v)):
        if y is not None:
            grads[name] = empty(y.shape, dtype)
            table.states(f"out_d{name}", grads[name])
    if x.u is not None:
        grads["u"] = zeros((count, *x.u.shape), dtype)
        table.tokens("out_du", grads["u"], x.v.shape[-2])
    return grads
