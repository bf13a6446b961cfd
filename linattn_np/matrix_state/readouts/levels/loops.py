"""Spans of up to LEVEL_TOKENS tokens, token by token in compiled loops on NumPy arrays (cpu/levels.py)."""

from __future__ import annotations

from typing import Any

import numpy as np

from ....runtime.arrays import Array, is_numpy
from ....runtime.shapes import Sequence
from ... import core, policy
from ...types import LevelState, Plan
from .rows import Gradients, LevelInputs, Row


def takes(fn: str, x: LevelInputs, plan: Plan, wanted: str | None) -> bool:
    """Whether all sequences of a call are so short."""
    lengths = [s.stop - s.start for s in plan.sequences]
    return bool(lengths) and is_short(fn, x, plan, wanted, max(lengths))


def is_short(fn: str, x: LevelInputs, plan: Plan, wanted: str | None, length: int) -> bool:
    """Whether the loops take a sequence of this length."""
    if not is_numpy(plan.xp) or length > policy.LEVEL_TOKENS or plan.chunk_size not in (None, 1):
        return False
    has_numbers = 0 not in (*x.v.shape, *x.k.shape, *x.lam.shape)
    return has_numbers and core.choose(fn, x.core, plan, wanted) is core.NUMBA


def compiled() -> Any:
    """The module that computes a call."""
    from ...cpu import level_calls

    return level_calls


def forward(row: Row) -> tuple[Any, Array, Any]:
    """(out or None, final S, residuals)."""
    sequences = tuple(Sequence(n, s.start, s.stop) for n, s in enumerate(row.spans))
    plan = row.plan._replace(sequences=sequences, returns_state=True, overwrite=False)
    state = None if row.S is None else LevelState(row.S, np.array([s.first for s in row.spans], np.int64))
    out, end, saved = compiled().forward(row.x, plan, state)
    return out, end.S, saved


def backward(saved: Any, dout: Any, dS: Any) -> Gradients:
    """Gradients of the row's arrays."""
    x, begin = saved.backward(dout, None if dS is None else LevelState(dS, None))
    d = Gradients({name: y for name, y in x._asdict().items() if y is not None})
    d.add(S=None if begin is None else begin.S)
    return d
