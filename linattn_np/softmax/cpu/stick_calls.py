"""Stick-breaking attention in compiled loops: calls on NumPy arrays as tables, tasks and kernels."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...runtime.pieces.memory import empty
from ..heads import groups
from ..policy import CPU_ROWS, cpu_tile
from ..sequences import out_shape
from ..types import Inputs, SoftmaxPlan
from .calls import all_heads, cotangent, operations, run, table_of, tasks_of


def forward(plan: SoftmaxPlan, x: Inputs, state: Any) -> np.ndarray:
    """out (..., Tq, heads, V); the cache in the order of its tokens."""
    C, out = cpu_tile(plan.chunk_size), empty(out_shape(x), np.dtype(plan.dtype))
    table = table_of(plan, x, state, C[0])
    table.put("out", out)
    tasks = tasks_of(plan, x, 1, -(-CPU_ROWS // C[0]) * C[0])
    run("stick", plan, x, state, (*C, 1), table, tasks, operations(plan, x, state))
    return out


def backward(plan: SoftmaxPlan, x: Inputs, state: Any, dout: np.ndarray) -> tuple[Inputs, Any]:
    """(gradients of the inputs, of the cache)."""
    dtype, C, group = np.dtype(plan.dtype), cpu_tile(plan.chunk_size)[1], all_heads(x) // max(groups(x), 1)
    dout = cotangent(x, dout, dtype)
    table = table_of(plan, x, state, C)
    d = Inputs(*(empty(y.shape, dtype) for y in x[:3]))
    begin = None if state is None else type(state)(*(np.zeros(y.shape, dtype) for y in state))
    for name, y in (("in_dout", dout), ("out_dq", d.q), ("out_dk", d.k), ("out_dv", d.v)):
        table.put(name, y)
    if begin is not None:
        table.put("past_dk", begin.k)
        table.put("past_dv", begin.v)
    run(
        "stick_vjp", plan, x, state, (C, C, group), table, tasks_of(plan, x, group, 0), 2.5 * operations(plan, x, state)
    )
    return d, begin
