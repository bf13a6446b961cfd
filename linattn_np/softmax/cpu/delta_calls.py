"""The linear system of deltaformer in compiled loops: calls on NumPy arrays as tables, tasks and kernels."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..heads import groups
from ..policy import cpu_tile
from ..types import Inputs, SoftmaxPlan
from .calls import all_heads, column, operations, run, table_of, tasks_of


def forward(
    plan: SoftmaxPlan, x: Inputs, beta: np.ndarray, state: Any
) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
    """(u (..., T, H, V), (r (..., T, H, V), the logs of the sums (..., T, H, 1))); x has the values v."""
    dtype, (*lead, T, H, V), C = np.dtype(plan.dtype), x.v.shape, cpu_tile(plan.chunk_size)
    u, r = np.zeros((*lead, T, H, V), dtype), np.empty((*lead, T, H, V), dtype)
    logs = np.empty((*lead, H, T), dtype).swapaxes(-1, -2)[..., None]
    table = table_of(plan, x._replace(v=u), state, C[0])
    for name, y in (("in_rhs", x.v), ("in_beta", column(beta)), ("out", r), ("logs", logs)):
        table.put(name, y)
    run("delta", plan, x, state, (*C, 1), table, tasks_of(plan, x, 1, 0), operations(plan, x, state))
    return u, (r, logs)


def backward(
    plan: SoftmaxPlan, x: Inputs, beta: np.ndarray, state: Any, results: Any, du: np.ndarray
) -> tuple[Inputs, np.ndarray, Any]:
    """(gradients of the inputs, of beta, of the cache); x has the values v, results: of forward."""
    heads, dtype, C = all_heads(x), np.dtype(plan.dtype), cpu_tile(plan.chunk_size)[1]
    u, (r, logs) = results
    du, shape = np.ascontiguousarray(du, dtype), x.v.shape
    table = table_of(plan, x._replace(v=u), state, C)
    d = Inputs(*(None if y is None else np.zeros(y.shape, dtype) for y in x))
    dbeta, dr = np.zeros(shape[:-1], dtype), np.empty(shape, dtype)
    begin = None if state is None else type(state)(*(np.zeros(y.shape, dtype) for y in state))
    for name, y in (("in_beta", column(beta)), ("out", r), ("logs", logs), ("in_du", du), ("in_dout", dr),
                    ("out_dq", d.q), ("out_dk", d.k), ("out_dv", d.v), ("out_dg", column(d.g)),
                    ("out_dbeta", column(dbeta))):  # fmt: skip
        table.put(name, y)
    if begin is not None:
        for name, y in (("past_dk", begin.k), ("past_dv", begin.v), ("past_db", column(getattr(begin, "b", None)))):
            table.put(name, y)
    group = heads // max(groups(x), 1)
    run(
        "delta_vjp", plan, x, state, (C, C, group), table, tasks_of(plan, x, group, 0), 2.5 * operations(plan, x, state)
    )
    return d, dbeta, begin
