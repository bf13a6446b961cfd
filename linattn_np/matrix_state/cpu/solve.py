"""Systems of a SOLVED read-out, as readouts/systems.py calls them: the chunk form with solutions as its output."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from ...core import StatesAt
from ..readouts.systems import Solver
from ..types import Inputs, Plan
from .forms import CallArrays, chunks
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
    made, single = CallArrays.of(x, plan, Z, False), lengths(rows) == 1
    for own in (rows[single], rows[~single]):
        if len(own):
            chunks(x, plan, made.table, own, solver=solver).run(made.table.numbers, made.table)
    return made.out, made.end if made.at is None else StatesAt(made.end, made.at)
