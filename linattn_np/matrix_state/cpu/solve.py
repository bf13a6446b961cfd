"""Systems of a SOLVED read-out, as readouts/systems.py calls them: the chunk form with solutions as its output."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np

from ...core import StatesAt
from ...runtime.pieces.memory import handles
from ...runtime.pieces.run import Kernel
from ...runtime.tracing import Trace
from .. import policy
from ..readouts.systems import Solver
from ..types import Inputs, Plan
from .chunks import Made, chunks
from .recurrent.systems import solve_token
from .replay import loops
from .table import AT, BATCH, FIRST, STATE, lengths, sequences


def _systems(x: Inputs, ridge: np.ndarray, solver: Solver, plan: Plan, Z: np.ndarray | None, rows: np.ndarray
             ) -> tuple[Kernel, Made]:  # fmt: skip
    """The systems of some sequences of a call: all but where its arrays lie, and the arrays of all sequences."""
    ridge = np.broadcast_to(ridge, (*ridge.shape[:-3], x.v.shape[-3], *ridge.shape[-2:]))
    made = Made.of(x._replace(r=ridge), plan, Z, False)
    return chunks(x, plan, made.table, rows, solver=solver), made


def solve(
    x: Inputs, ridge: np.ndarray, solver: Solver, plan: Plan, Z: np.ndarray | None
) -> tuple[np.ndarray | None, Any]:
    """(x_t, Z after the last token), as readouts/systems.py's; with positions above 0 a StatesAt of it.

    Sequences of one token have a form of their own.
    """
    if x.v.shape[-3] == 1 and not plan.is_ragged and plan.states_at is None:
        return solve_token(x, ridge, solver, plan, Z)
    rows = _rows(x, plan)
    single = lengths(rows) == 1
    systems, made = _systems(x, ridge, solver, plan, Z, rows[~single])
    if not single.all():
        systems.run(made.table.numbers, made.table)
    if single.any():
        _solve_single(x, ridge, solver, plan, Z, (rows[single], made))
    return made.out, made.end if made.at is None else StatesAt(made.end, made.at)


def _rows(x: Inputs, plan: Plan) -> np.ndarray:
    """The sequences of a call."""
    *lead, T, _, _ = x.v.shape
    return sequences(plan, prod(lead), policy.cpu_chunk(plan, T))


def _solve_single(x: Inputs, ridge: np.ndarray, solver: Solver, plan: Plan, Z: np.ndarray | None,
                  to: tuple[np.ndarray, Made]) -> None:  # fmt: skip
    """Sequences of one token, gathered; to: their rows, and where results belong."""
    (rows, made), each = to, lambda y: y.reshape(-1, *y.shape[-3:])
    t, batch = rows[:, FIRST], rows[:, BATCH]

    def chosen(y: np.ndarray) -> np.ndarray:
        y = each(y)
        return y[batch if len(y) > 1 else 0 * batch, t if y.shape[1] > 1 else 0 * t][:, None]

    own = Inputs(*(None if y is None else chosen(y) for y in x))
    begin = None if Z is None else each(Z)[rows[:, STATE]]
    read, end = solve_token(own, ridge if ridge.shape[-3] == 1 else chosen(ridge), solver, plan, begin)
    each(made.out)[batch, t] = read[:, 0]
    each(made.end)[rows[:, STATE]] = end
    if made.at is not None:
        at = rows[:, AT] > 0
        each(made.at)[rows[at, AT] - 1] = end[at]


def record_solve(
    keys: tuple[Inputs, np.ndarray], solver: Solver, plan: Plan, Z: np.ndarray | None, trace: Trace
) -> Callable[..., Any]:
    """`solve` for other arrays in place of trace.given: (arrays, Z) -> (x_t, Z after the last token).

    keys: the memory and the ridge, views of given arrays. Not for calls of one token.
    """
    systems, (table, end, found, _) = _systems(*keys, solver, plan, Z, _rows(keys[0], plan))
    own = {"out_state": end, "out": found} | ({} if Z is None else {"in_state": Z})
    run = loops(systems, table, trace, (trace.given, own))
    shapes, dtype, kept = (found.shape, end.shape), end.dtype, table.kept
    del table, end, found, own

    def call(arrays: list[np.ndarray], Z: np.ndarray | None, owners: Any = kept) -> Any:
        found, end = (np.empty(shape, dtype) for shape in shapes)
        given = [*arrays, end, found] if Z is None else [*arrays, end, found, Z]
        return (found, end) if run(handles(given), given) else None

    return call
