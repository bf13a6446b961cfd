"""Systems of a SOLVED read-out, as readouts/systems.py calls them: the chunk form with solutions as its output."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np

from ...core import StatesAt
from ...runtime.tracing import Trace, traced
from ..readouts.systems import Solver
from ..types import Inputs, Plan
from .forms import Made, chunks
from .replay import record
from .table import lengths, sequences


def _with(x: Inputs, ridge: Any) -> Inputs:
    """Inputs with the ridge of every token in the place of r."""
    return x._replace(r=np.broadcast_to(ridge, (*ridge.shape[:-3], x.v.shape[-3], *ridge.shape[-2:])))


def solve(
    x: Inputs, ridge: np.ndarray, solver: Solver, plan: Plan, Z: np.ndarray | None
) -> tuple[np.ndarray | None, Any]:
    """(x_t, Z after the last token), as readouts/systems.py's; with positions above 0 a StatesAt of it.

    Sequences of one token have a form of their own.
    """
    x, rows = _with(x, ridge), sequences(plan, prod(x.v.shape[:-3]))
    made, single = Made.of(x, plan, Z, False), lengths(rows) == 1
    for own in (rows[single], rows[~single]):
        if len(own):
            chunks(x, plan, made.table, own, solver=solver).run(made.table.numbers, made.table)
    return made.out, made.end if made.at is None else StatesAt(made.end, made.at)


def solve_token(x: Inputs, ridge: Any, solver: Solver, plan: Plan, Z: Any, overwrite: bool = False) -> tuple[Any, Any]:
    """`solve` of a traced call of one token, as one of the calls of its trace; overwrite: Z is overwritten."""
    trace: Any = traced(x.v)
    x = _with(x, ridge)
    table, end, *_ = Made.of(x, plan, Z, overwrite, trace.new)
    systems, arrays = chunks(x, plan, table, sequences(plan, prod(x.v.shape[:-3])), solver=solver), table.kept
    arrays["out"] = arrays.pop("out")  # the last one
    return trace.kernel(systems.traced(table.numbers, arrays)), trace.view(end)


def record_solve(
    keys: tuple[Inputs, np.ndarray], solver: Solver, plan: Plan, Z: np.ndarray | None, trace: Trace
) -> Callable[..., Any] | None:
    """`solve` for other arrays in place of trace.given, as `record`: (arrays, Z) -> (x_t, Z after the last token).

    keys: the memory and the ridge, views of given arrays. Not for calls of one token.
    """
    return record(_with(*keys), plan._replace(overwrite=False), Z, trace, solver=solver)
