"""Recorded plans of calls whose values have a column for the sum of weights, and whose state has two parts.

v = [values, weights], the state [S, z]: columns do not depend on each other. Where S and z are the columns of one
array, as they are returned, they are computed at once, else one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ...runtime.arrays import Array
from ...runtime.pieces.memory import address, gap
from ...runtime.tracing import Trace, of_output, plain
from .. import core
from ..types import Inputs, Plan

new = tuple.__new__  # calling a NamedTuple class takes three times as long
Divide = Callable[[Array, Array], Array]  # of numerators and denominators


def record_with_sums(x: Inputs, plan: Plan, state: Any, residuals: Any, trace: Trace, divide: Divide,
                     kind: type[Any], more: tuple[Array, ...] = ()) -> Any:  # fmt: skip
    """The plan of a traced call: (arrays, state, pointers) -> (out, a state of type `kind`); None without one.

    more: the parts after S and z in that state, results of the array calls; of a state that is given it is the last
    arrays of the trace.
    """
    if state is not None and not (state[0].dtype == state[1].dtype == plan.dtype):
        return None
    both = None if state is None else joined(*state[:2])
    if both is not None or (state is None and x.q is not None):
        return _at_once(x, plan, both, residuals, trace, divide, kind, more)
    return _one_by_one(x, plan, state, residuals, trace, divide, kind, more)


def joined(S: np.ndarray, z: np.ndarray) -> np.ndarray | None:
    """[S, z] as a view if z lies in the column behind S, as where both are returned; None if it does not."""
    V, size = S.shape[-1], S.itemsize
    if S.strides[-1] != size or S.strides[:-1] != z.strides or address(z) != address(S) + V * size:
        return None
    return np.lib.stride_tricks.as_strided(S, (*S.shape[:-1], V + 1), S.strides)


def _at_once(x: Inputs, plan: Plan, both: Any, residuals: Any, trace: Trace, divide: Divide, kind: type[Any],
             more: tuple[Array, ...]) -> Any:  # fmt: skip
    """Of a state whose parts are joined, or of none."""
    from ..cpu.forms import in_place  # where a plan is recorded, there are compiled loops

    if plan.overwrite and not in_place(Inputs(*map(plain, x)), plan, both):
        return None

    def then(out: Any, end: Array) -> Any:
        parts = (() if plan.overwrite else (end[..., :-1], end[..., -1])) + more
        return None if out is None else divide(out[..., :-1], out[..., -1:]), parts

    found = core.record(x, plan, both, residuals, trace, then)
    if found is None:
        return None
    width = 0 if both is None else (both.shape[-1] - 1) * both.itemsize
    overwrite, has_more = plan.overwrite, len(more) > 0

    def call(arrays: list[np.ndarray], state: Any, pointers: None = None) -> Any:
        S = None
        if state is not None:
            S = state[0]
            if gap(S, state[1]) != width:
                return None
            if has_more:
                arrays = [*arrays, *state[2:]]
        computed = found(arrays, S, None)
        if computed is None:
            return None
        return computed[0], _overwritten(state, computed[1], kind) if overwrite else new(kind, computed[1])

    return call


def _overwritten(state: Any, more: Any, kind: type[Any]) -> Any:
    """The given state with new S and z, and the parts after them."""
    for y, new_y in zip(state[2:], more, strict=True):
        y[...] = new_y
    return new(kind, state)


def _one_by_one(x: Inputs, plan: Plan, state: Any, residuals: Any, trace: Trace, divide: Divide, kind: type[Any],
                more: tuple[Array, ...]) -> Any:  # fmt: skip
    """Of S and z that lie apart."""
    from ...ops.cpu.programs import computed, place_of  # where a plan is recorded, there are compiled loops
    from ...runtime.pieces.run import Overlap

    add, following = computed(trace)
    x = Inputs(*map(plain, x))
    S, z = (None, None) if state is None else state[:2]
    sums = core.record(x._replace(v=x.v[..., -1:]), plan, None if z is None else z[..., None], residuals, following)
    den = np.empty((*x.v.shape[:-2], max(x.v.shape[-2], 0 if x.q is None else x.q.shape[-2]), 1), plan.dtype)
    both = Trace([*following.given, den])
    numerators = core.record(x._replace(v=x.v[..., :-1]), plan, S, residuals, both,
                             of_output(lambda out: divide(out, both.arrays[-1])))  # fmt: skip
    if sums is None or numerators is None:
        return None
    overwrite, none = plan.overwrite, x.q is None
    overlap = Overlap((S, z), trace.given) if overwrite and state is not None else None
    others = [place_of(trace, y) for y in more]

    def call(arrays: list[np.ndarray], state: Any, pointers: None = None) -> Any:
        S, z, *last = (None, None) if state is None else state
        arrays = [*arrays, *last]
        if overlap is not None and overlap((S, z), arrays):
            return None
        arrays = add(arrays)
        found = sums(arrays, None if z is None else z[..., None], None)
        if found is None:
            return None
        out = numerators([*arrays, z if none else found[0]], S, None)
        if out is None:
            return None
        after = [np.ndarray(shape, dtype, arrays[-1], offset, steps) for shape, dtype, offset, steps in others]
        if overwrite:
            return out[0], _overwritten(state, after, kind)
        return out[0], new(kind, (out[1], found[1][..., 0], *(y.copy() for y in after)))

    return call
