"""Systems of a SOLVED read-out, as readouts/systems.py calls them: the chunk form with solutions as its output."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np

from ...core import StatesAt
from ...ops.cpu.programs import Places
from ...runtime.tracing import Trace
from .. import policy
from ..readouts.systems import Solver
from ..types import Inputs, Plan
from .chunks import Chunks, Made
from .replay import run_chunks, sources_of
from .table import sequences


def _systems(x: Inputs, ridge: np.ndarray, solver: Solver, plan: Plan, Z: np.ndarray | None) -> tuple[Chunks, Made]:
    """The systems of a call: all but where its arrays lie, and its arrays."""
    *lead, T, _, _ = x.v.shape
    ridge = np.broadcast_to(ridge, (*ridge.shape[:-3], T, *ridge.shape[-2:]))
    made = Made.of(x._replace(r=ridge), plan, Z, False)
    rows = sequences(plan, prod(lead), policy.cpu_chunk(plan, T))
    return Chunks(x, plan, made.table, rows, Z is not None, solver=solver), made


def solve(
    x: Inputs, ridge: np.ndarray, solver: Solver, plan: Plan, Z: np.ndarray | None
) -> tuple[np.ndarray | None, Any]:
    """(x_t, Z after the last token), as readouts/systems.py's; with positions above 0 a StatesAt of it."""
    systems, (table, end, found, at) = _systems(x, ridge, solver, plan, Z)
    systems.run(table.numbers, table)
    return found, end if at is None else StatesAt(end, at)


def record_solve(
    keys: tuple[Inputs, np.ndarray], solver: Solver, plan: Plan, Z: np.ndarray | None, trace: Trace
) -> Callable[..., Any]:
    """`solve` for other arrays in place of trace.given: (arrays, Z) -> (x_t, Z after the last token).

    keys: the memory and the ridge, views of given arrays.
    """
    systems, (table, end, found, _) = _systems(*keys, solver, plan, Z)
    own = {"out_state": end, "out": found} | ({} if Z is None else {"in_state": Z})
    numbers = table.numbers.copy()
    run = run_chunks(systems, numbers, sources_of(numbers, Places(trace), len(trace.given), own), 0, (None, None))
    shapes, dtype, kept = (found.shape, end.shape), end.dtype, table.kept
    del table, end, found, own

    def call(arrays: list[np.ndarray], Z: np.ndarray | None, owners: Any = kept) -> Any:
        found, end = (np.empty(shape, dtype) for shape in shapes)
        given = [*arrays, end, found] if Z is None else [*arrays, end, found, Z]
        return (found, end) if run(None, given) else None

    return call
