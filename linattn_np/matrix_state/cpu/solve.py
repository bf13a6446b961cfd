"""Systems of a SOLVED read-out, as readouts/systems.py calls them: the chunk form with solutions as its output."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from ...core import StatesAt
from ...ops.cpu.formulas import dense
from ...ops.cpu.numbers import number
from ...runtime.pieces.memory import new_flag
from ...runtime.pieces.piece import Whole, piece, workspace_kind
from ...runtime.pieces.run import over_matrices
from ...runtime.pieces.views import row
from ...runtime.pieces.workspace import Matrix, Workspace
from ..readouts.systems import Solver
from ..types import Inputs, Plan
from .forward import chunks
from .tasks import add_results, lengths, sequences, table_of

RIDGE = Workspace("ridge", ("K",), (), (), {"given": {
    "ridge": Matrix("count", "K"), "flag": Matrix("one", dtype="int64")}})  # fmt: skip
Work = workspace_kind(RIDGE)


@piece
def find_zeros(w: Work, first: Whole, last: Whole):
    """Set the flag where an entry of rows first..last is 0 or less."""
    least = number(row(w.ridge, 0), 1)
    for n in range(first, last):
        x = row(w.ridge, n)
        for d in range(len(x)):
            least = x[d] if x[d] < least else least
    if least <= 0:
        w.flag[0] = 1


def is_positive(ridge: np.ndarray) -> bool:
    """Whether no entry (..., K) is 0 or less; a repeated call where one is is computed in full."""
    if not ridge.size:
        return True
    flag, K = new_flag(), ridge.shape[-1]
    rows = dense(ridge, ridge.dtype).reshape(-1, K)
    sizes = {"count": len(rows), "K": K, "one": 1}
    over_matrices(find_zeros, RIDGE, sizes | {"ridge": rows, "flag": flag}, len(rows), rows.dtype.name, is_small=True)
    return not flag[0]


def _with(x: Inputs, ridge: Any) -> Inputs:
    """Inputs with the ridge of every token in the place of r."""
    return x._replace(r=np.broadcast_to(ridge, (*ridge.shape[:-3], x.v.shape[-3], *ridge.shape[-2:])))


def solve(
    x: Inputs, ridge: np.ndarray, solver: Solver, plan: Plan, Z: np.ndarray | None
) -> tuple[np.ndarray | None, Any]:
    """(x_t, Z after the last token), as readouts/systems.py's; with positions above 0 a StatesAt of it.

    Sequences of one token, and exact solutions, have a form of their own. A repeated call one of whose exact solutions
    is not finite is computed in full.
    """
    x, rows = _with(x, ridge), sequences(plan, prod(x.v.shape[:-3]))
    table, single = table_of(x, plan), lengths(rows) == 1
    out, end, at = add_results(table, x, plan, Z, in_place=False)
    if solver.exact:
        table.put("flag", new_flag().view(np.dtype(plan.dtype))[:1].reshape((1, 1, 1, 1)), (0, 0, 0, 0), 1)
    for own in (rows,) if solver.exact else (rows[single], rows[~single]):
        if len(own):
            chunks(x, plan, table, own, solver=solver)
    return out, end if at is None else StatesAt(end, at)
