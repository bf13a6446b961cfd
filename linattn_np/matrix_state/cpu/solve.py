"""Systems of a SOLVED read-out, as readouts/systems.py calls them: the chunk form with solutions as its output."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from ...core import StatesAt
from ..readouts.systems import Solver
from ..types import Inputs, Plan
from .forward import chunks
from .tasks import lengths, sequences
from .workspace import Table


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
    table, single = Table(x, plan), lengths(rows) == 1
    table.results(x, plan, Z, in_place=False)
    for own in (rows[single], rows[~single]):
        if len(own):
            chunks(x, plan, table, own, solver=solver)
    return table.out, table.end if table.at is None else StatesAt(table.end, table.at)
