"""The chunk form in compiled loops, for NumPy arrays: programs and tables go in, threads share out the heads."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from ...runtime import threads
from ...runtime.arrays import cast, sum_to
from ...runtime.pieces.workspace import SHARED
from .. import policy
from ..array import chunks
from ..types import Erase, Inputs, Plan, Saved
from .backward import backward as backward_kernel
from .backward import reverse
from .chunks import Chunks, cell_of, columns_of, numbers_of, state_shape, tokens
from .kernels import optional_vjp, storage_pieces
from .l2norm import unit_rows as unit_rows
from .l2norm import unit_rows_vjp as unit_rows_vjp
from .layout import Backward, Cell, layout
from .recurrent import short
from .replay import record as record
from .run import Kernel, run
from .strips import kept_strip, strips
from .systems import solve as solve
from .table import CHUNKS, FIRST, HEAD, LEAD, STATE, STOP, TO, Table, from_pool, sequences

HANDLES = frozenset(("wide_keys", "record", "recompute", "features", "averages", "conjugate_gradients"))


def handles(call: Any) -> frozenset[str]:
    """The capabilities for a call."""
    x, plan = call
    plain = plan.causal and plan.features is plan.average is None and x.v.size and x.k.size
    return HANDLES | {"pools"} if plain else HANDLES


def form(call: Any) -> tuple[str, int | None]:
    """(form, tokens of a chunk or None)."""
    if walks_tokens(*call):
        return "recurrent form", None
    return "chunk form", policy.cpu_chunk(call.plan, call.x.v.shape[-3])


def describe(call: Any) -> str:
    """What is special about a call, in words."""
    if call.x.gv is None:
        return ""
    return "a decay on the value axis walks the tokens forward, and goes back in chunks"


def forward(x: Inputs, plan: Plan, state: np.ndarray | None) -> tuple[np.ndarray | None, np.ndarray, Saved]:
    """(out, final state, saved)."""
    if not (x.v.size and x.k.size):  # nothing to walk over
        return chunks.forward(x, plan, state)
    (*lead, T, _, V), dtype, table = x.v.shape, np.dtype(plan.dtype), Table(x)
    C = policy.cpu_chunk(plan, T)
    rows = sequences(plan, prod(lead), C)
    out = None if x.q is None else np.empty((*lead, T, table.asking, V), dtype)
    ragged = not plan.sequences or plan.sequences[0].row is not None
    in_place = state is not None and short.in_place(x, plan, state)
    end: Any = state if in_place else np.empty((*([len(rows)] if ragged else lead), *state_shape(x, plan)), dtype)
    if plan.pool_rows is not None:
        from_pool(rows, plan.pool_rows, in_place)
    table.tokens("out", out, table.asking)
    _constants(table, x, plan, dtype)
    table.states("in_state", state)
    table.states("out_state", end)
    stepwise = short.is_stepwise(x, plan, rows)
    if stepwise.any():
        short.run(x, plan, table, state, rows[stepwise])
    kept, starts = kept_states(x, plan, rows, C) if plan.gradients and not stepwise.all() else (0, None)
    table.states("starts", end if starts is None else starts)
    if not stepwise.all():
        walked = rows[~stepwise]
        Chunks(x, plan, table, walked, state is not None, kept).run(table.numbers, table)
        if starts is not None:
            last = walked[:, TO] + np.maximum(-(-(walked[:, STOP] - walked[:, FIRST]) // kept), 1) - 1
            end.reshape(-1, *end.shape[-3:])[walked[:, STATE]] = starts[last]
    return None if out is None else cast(plan.xp, out, x.v.dtype), end, Saved(x, plan, state, starts)


def _constants(table: Table, x: Inputs, plan: Plan, dtype: np.dtype) -> None:
    """What a feature map and a division by sums need."""
    if plan.features is not None:
        table.constants(plan.features.tables(x.k.shape[-1], dtype))
    if plan.average is not None:
        table.tokens("out_sums", plan.average.sums, table.asking)


def kept_states(x: Inputs, plan: Plan, rows: np.ndarray, C: int) -> tuple[int, np.ndarray | None]:
    """(tokens of a strip, scratch of the states between strips) where a backward takes them; sets TO of the rows."""
    shape, dtype = state_shape(x, plan), np.dtype(plan.dtype)
    kept = 0 if x.u is not None else kept_strip(rows, prod(shape) * dtype.itemsize, C)
    total = int(rows[-1, TO]) + max(-(-int(rows[-1, STOP] - rows[-1, FIRST]) // kept), 1) if kept else 0
    return kept, np.empty((total, *shape), dtype) if kept else None


def walks_tokens(x: Inputs, plan: Plan) -> bool:
    """Whether all sequences of a call are walked token by token."""
    return bool(short.is_stepwise(x, plan, sequences(plan, 1, 1)).all())


def backward(saved: Saved, dout: np.ndarray | None, dstate: np.ndarray | None) -> tuple[Inputs, np.ndarray]:
    """Gradients of every input, in the dtype of the computation, and of the initial state."""
    x, plan, state, starts = saved
    if not (x.v.size and x.k.size) or short.goes_back_elsewhere(x):
        _, _, kept = chunks.forward(x, plan, state)
        return chunks.backward(kept, dout, dstate)
    (*lead, T, H, V), dtype, table = x.v.shape, np.dtype(plan.dtype), Table(x)
    C, asked = policy.cpu_chunk(plan, T), x.q is not None and dout is not None
    rows = sequences(plan, prod(lead), C)
    ragged = not plan.sequences or plan.sequences[0].row is not None
    dS = np.empty((*([len(rows)] if ragged else lead), *state_shape(x, plan)), dtype)
    grads = _gradients(x, plan, table, asked, len(rows))
    _constants(table, x, plan, dtype)
    table.states("in_state", state)
    table.states("in_dstate", dstate)
    table.states("out_dstate", dS)
    if asked:
        table.tokens("in_dout", dout, table.asking)
        table.tokens("out", None if plan.average is None else plan.average.out, table.asking)
    table.states("starts", starts)
    cell = cell_of(x, plan, table, V, state is not None)._replace(asked=asked)
    group, count = int(table.numbers[:, SHARED].max()), threads.num_threads()
    keeps = 0 if starts is None else kept_strip(rows, starts[0].nbytes, C)
    tasks, bounds = strips(rows, H // group, V, V, C, max(1, len(rows) * H // group // count), keeps, last_first=True)
    tasks[:, HEAD] *= group
    operations = 16.0 * tokens(rows) * H * cell.K * V
    plain = x.erase is Erase.NONE and x.gv is None  # gradients of the states between strips can be found before
    known = keeps > 0 and asked and plain
    apart = known and len(bounds) - 1 < min(count, len(tasks)) and operations > policy.APART_OPERATIONS
    if apart:
        bounds = list(range(len(tasks) + 1))
        _find_ends(x, plan, table, rows, np.empty_like(starts), cell, keeps, dstate is not None)
    made, segment = layout(cell, Backward(group, int(tasks[:, CHUNKS].max(initial=1)), dstate is not None, apart))
    optional = (*optional_vjp(cell), *storage_pieces(table.numbers, cell.dtype))
    kernel = Kernel(backward_kernel, optional, cell.dtype, made, numbers_of(plan))
    tasks[:, LEAD] = C * ((tasks[:, CHUNKS] - 1) % segment + 1)
    run(kernel, table.numbers, tasks, bounds, operations, (table, x, saved))
    summed = {name: sum_to(plan.xp, d, getattr(x, name).shape) for name, d in grads.items()}
    return Inputs(**{name: summed.get(name) for name in Inputs._fields}), dS


def _find_ends(x: Inputs, plan: Plan, table: Table, rows: np.ndarray, ends: np.ndarray, cell: Cell, kept: int,
               dstate: bool) -> None:  # fmt: skip
    """Gradients of the states between strips, by blocks of value columns."""
    table.states("ends", ends)
    H, V = x.v.shape[-2:]
    columns = V if plan.average is not None else columns_of(V, len(rows) * H, threads.num_threads())
    tasks, bounds = strips(rows, H, V, columns, cell.C, 1, kept, last_first=True)
    cell = cell._replace(V=columns)
    optional = (*optional_vjp(cell), *storage_pieces(table.numbers, cell.dtype))
    kernel = Kernel(reverse, optional, cell.dtype, layout(cell, Backward(1, 1, dstate, True))[0],
                    numbers_of(plan))  # fmt: skip
    run(kernel, table.numbers, tasks, bounds, 2.0 * tokens(rows) * H * cell.K * V, (table, x))


def _gradients(x: Inputs, plan: Plan, table: Table, asked: bool, count: int) -> dict[str, np.ndarray]:
    """Arrays for the gradients by input, with all batch rows, put into the table."""
    dtype, lead, made = np.dtype(plan.dtype), x.v.shape[:-3], {}
    for name, row in (("q", "out_dq"), ("k", "out_dk"), ("v", "out_dv"), ("g", "out_dg"), ("r", "out_dr"),
                      ("beta", "out_dbeta"), ("a", "out_dr"), ("b", "out_db"), ("gv", "out_dgv")):  # fmt: skip
        y = getattr(x, name)
        if y is not None:
            make = np.zeros if name == "q" and not asked else np.empty
            made[name] = make((*lead, *y.shape[-3:]), dtype)
            table.tokens(row, made[name], table.asking if name == "q" else table.H)
    if x.u is not None:
        made["u"] = np.zeros((count, *x.u.shape), dtype)
        table.tokens("out_du", made["u"], table.H)
    return made
