"""Short sequences in compiled loops: which take the recurrent form, and how it is shared out.

A form is chosen by the length of its own sequence: the same sequence gives the same bits alone and among others.
"""

from __future__ import annotations

import numpy as np

from ...ground import threads
from .inputs import Inputs, Plan
from .numba_step import step_tasks
from .numba_step_table import TOKENS, layout
from .numba_table import BLOCKS, DIRECT, QUERIES, Table, memory, sizes

SHORT = 16  # tokens that are walked one by one where the caller leaves the form open
BLOCK = 128  # value columns: a state is shared out in multiples of it
FEW_BYTES = 2**22  # of states; below, threads cost more than they give


def is_stepwise(x: Inputs, plan: Plan, rows: np.ndarray) -> np.ndarray:
    """Whether each sequence is walked token by token: asked for, or short, or nothing else covers it."""
    if plan.chunk_size == 1 or x.gv is not None or (x.u is not None and x.a is not None) or (x.u is not None and x.beta is not None):
        return np.ones(len(rows), bool)
    return (rows[:, 2] - rows[:, 1] <= SHORT) & (plan.chunk_size is None)


def in_place(plan: Plan, state: np.ndarray | None) -> bool:
    """Whether the final state is written where the initial one lies."""
    return plan.overwrite_state and state.flags.c_contiguous and state.flags.writeable and state.dtype == plan.dtype


def run(x: Inputs, plan: Plan, table: Table, state: np.ndarray | None, rows: np.ndarray) -> None:
    """Walk the sequences in `rows`."""
    dtype, tokens = np.dtype(plan.dtype), int((rows[:, 2] - rows[:, 1]).max())
    H, K, V = x.v.shape[-2], x.k.shape[-1], x.v.shape[-1]
    states = len(rows) * H
    few = states * K * V * dtype.itemsize * tokens < FEW_BYTES
    count = 1 if few else threads.num_threads()
    share = -(-count // states)
    columns = min(V, max(1, -(-V // (share * BLOCK))) * BLOCK)
    n = sizes(x, plan, TOKENS, columns, state is not None)
    n[DIRECT] = state is not None and state.dtype == dtype and state.strides[-1] == dtype.itemsize
    w, size = layout(K, int(n[QUERIES]), min(tokens, TOKENS), dtype.itemsize)
    kernel, one, scale, numbers = step_tasks(dtype), dtype.type(1), dtype.type(plan.scale), table.numbers

    def task(first: int, last: int) -> None:
        kernel(one, scale, numbers, n, rows, w, own_address(size), first, last)

    threads.run(task, states * int(n[BLOCKS]), count)


def own_address(count: int) -> int:
    """Of this thread's working memory, at least `count` bytes from a multiple of 64 on."""
    return -(-memory(count).__array_interface__["data"][0] // 64) * 64
