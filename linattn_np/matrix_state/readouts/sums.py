"""Recorded plans of calls whose values have a column for the sum of weights, and whose state has two parts.

    v = [values, weights], the state [S, z]: columns do not depend on each other, so that S and z are computed where
    they lie, one after the other
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ...runtime.arrays import Array
from ...runtime.tracing import Trace, plain
from .. import core
from ..types import Inputs, Plan

Divide = Callable[[Array, Array], Array]  # of numerators and denominators


def record_with_sums(x: Inputs, plan: Plan, state: Any, residuals: Any, trace: Trace, divide: Divide,
                     more: Any = None) -> Any:  # fmt: skip
    """The plan of a traced call: (arrays, (S, z), pointers) -> (out, (S, z)); None without one.

    more: another result of the array calls, which follows S and z.
    """
    from ...ops.cpu.array_calls import computed, place_of  # where a plan is recorded, there are compiled loops

    if not isinstance(x.v, np.ndarray):
        return None
    add, following = computed(trace)
    x = Inputs(*map(plain, x))
    S, z = (None, None) if state is None else state[:2]
    if S is not None and not (S.dtype == z.dtype == plan.dtype):
        return None
    sums = core.record(x._replace(v=x.v[..., -1:]), plan, None if z is None else z[..., None], residuals, following)
    den = np.empty((*x.v.shape[:-2], max(x.v.shape[-2], 0 if x.q is None else x.q.shape[-2]), 1), plan.dtype)
    last = Trace([*following.given, den])
    numerators = core.record(x._replace(v=x.v[..., :-1]), plan, S, residuals, last,
                             lambda out: divide(out, last.arrays[-1]))  # fmt: skip
    if sums is None or numerators is None:
        return None
    overwrite, none = plan.overwrite, x.q is None
    other = None if more is None else place_of(trace, more)

    def call(arrays: list[np.ndarray], state: Any, pointers: None = None) -> Any:
        S, z = (None, None) if state is None else state[:2]
        if overwrite and shares_memory((S, z), arrays):
            return None
        arrays = add(arrays)
        found = sums(arrays, None if z is None else z[..., None], None)
        if found is None:
            return None
        out = numerators([*arrays, z if none else found[0]], S, None)
        if out is None:
            return None
        parts = out[1], z if overwrite else found[1][..., 0]
        return out[0], parts if other is None else (*parts, np.ndarray(*other[:2], arrays[-1], *other[2:]).copy())

    return call


def shares_memory(parts: Any, arrays: list[np.ndarray]) -> bool:
    """Whether a part of a state that is overwritten lies in another one or may lie in an array."""
    if any(np.may_share_memory(S, y) for S in parts for y in arrays):
        return True
    return any(np.shares_memory(S, y) for n, S in enumerate(parts) for y in parts[:n])
