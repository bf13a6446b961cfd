"""The chunk form in compiled loops, for NumPy arrays: tables of whole numbers go in, threads share out the heads."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from ...ground import threads
from ...ground.namespace import cast
from . import COMPILED_CHUNK, chunks, numba_short
from .inputs import Inputs, Plan, Saved
from .numba_forward import forward_tasks
from .numba_table import (
    BLOCKS,
    HEADS,
    IN_STATE,
    N_K,
    N_V,
    OUT,
    OUT_STATE,
    Layout,
    Table,
    memory,
    sequences,
    sizes,
)

BLOCK = 32  # value columns: a state is shared out in multiples of it
FEW_OPERATIONS = 2e6  # below, threads cost more than they give


def forward(x: Inputs, plan: Plan, state: np.ndarray | None) -> tuple[np.ndarray | None, np.ndarray, Saved]:
    """(out, final state, saved)."""
    if not (x.v.size and x.k.size):  # nothing to walk over
        return chunks.forward(x, plan, state)
    (*lead, T, H, V), dtype, table = x.v.shape, np.dtype(plan.dtype), Table(x)
    rows = sequences(plan, prod(lead))
    stepwise = numba_short.is_stepwise(x, plan, rows)
    out = None if x.q is None else np.empty((*lead, T, table.asking, V), dtype)
    ragged, end = not plan.sequences or plan.sequences[0].row is not None, state
    if not numba_short.in_place(x, plan, state):
        end = np.empty((*([len(rows)] if ragged else lead), H, x.k.shape[-1], V), dtype)
    table.tokens(OUT, out, table.asking)
    table.states(IN_STATE, state)
    table.states(OUT_STATE, end)
    if stepwise.any():
        numba_short.run(x, plan, table, state, rows[stepwise])
    if stepwise.all():
        return None if out is None else cast(plan.xp, out, x.v.dtype), end, Saved(x, plan, state, None)
    rows = rows[~stepwise]
    columns = _columns(V, len(rows) * H)
    _run(forward_tasks(dtype), plan, table, sizes(x, plan, _chunk(plan), columns, state is not None), rows)
    return None if out is None else cast(plan.xp, out, x.v.dtype), end, Saved(x, plan, state, None)


again = numba_short.again


def backward(saved: Saved, dout: np.ndarray | None, dstate: np.ndarray | None) -> tuple[Inputs, np.ndarray]:
    """Gradients of every input, in the dtype of the computation, and of the initial state: by the chunk form."""
    x, plan, state, _ = saved
    _, _, kept = chunks.forward(x, plan, state)
    return chunks.backward(kept, dout, dstate)


def _chunk(plan: Plan) -> int:
    return plan.chunk_size if isinstance(plan.chunk_size, int) else COMPILED_CHUNK


def _columns(V: int, states: int) -> int:
    """Value columns of a task: all, or fewer where there are fewer states than threads."""
    share = -(-threads.num_threads() // max(states, 1))
    return min(V, max(1, -(-V // (share * BLOCK))) * BLOCK) if share > 1 else V


def _run(kernel: Any, plan: Plan, table: Table, n: np.ndarray, rows: np.ndarray) -> None:
    dtype = np.dtype(plan.dtype)
    tokens = int((rows[:, 2] - rows[:, 1]).sum())
    few = 6.0 * tokens * n[HEADS] * n[N_K] * n[N_V] < FEW_OPERATIONS
    one, scale, numbers, layout = dtype.type(1), dtype.type(plan.scale), table.numbers, Layout(n, dtype)

    def task(first: int, last: int) -> None:
        held = memory(layout.bytes)
        kernel(one, scale, numbers, n, rows, layout.at(held.__array_interface__["data"][0]), first, last)

    threads.run(task, len(rows) * int(n[HEADS] * n[BLOCKS]), 1 if few else threads.num_threads())
