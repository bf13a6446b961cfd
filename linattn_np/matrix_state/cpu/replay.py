"""A call that has been made, for other arrays of the same shapes, strides and dtypes: only addresses are told anew."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np

from ...core import StatesAt
from ...ops.cpu.rounding import put
from ...runtime.arrays import cast
from ...runtime.pieces.memory import address, handles
from ...runtime.pieces.workspace import AT
from .. import policy
from ..types import Inputs, Plan
from .chunks import Chunks
from .recurrent.short import Steps, in_place, is_one_batch, is_stepwise
from .table import ROW, Table, from_pool, sequences
from .workspace import ARRAYS

Again = Callable[[list[np.ndarray], "np.ndarray | None"], "tuple[np.ndarray | None, Any] | None"]
# from the addresses' table and what handles are of (given, end, out, state): False where it must be done in full
Walk = Callable[[list[np.ndarray]], bool]


def record(x: Inputs, plan: Plan, state: np.ndarray | None, given: list[np.ndarray]) -> Again | None:
    """The call for other arrays; None where more than addresses may differ.

    x are `given` with axes added, or None is what comes of it. The function gives (out, final state), or None where
    the call must be made in full: the state that is overwritten shares memory with what is read, or misaligned arrays.
    """
    if not plan.causal or not x.v.size or not x.k.size:
        return None
    if plan.sequences[0].row is not None:
        return None
    lies = [y is None or (y.size and _source(address(y), given) is not None and is_one_batch(y)) for y in x]
    if not all(lies) or plan.sequences[0].stop == 0:
        return None
    if state is not None and not (state.dtype.isnative and is_one_batch(state)):  # else a copy of it was read
        return None
    (*lead, T, H, V), dtype, table = x.v.shape, np.dtype(plan.dtype), Table(x)
    mine, pooled = state is not None and in_place(x, plan, state), plan.pool_rows is not None
    if pooled and plan.overwrite and not mine:  # rows are scattered afterwards
        return None
    end: Any = state if mine else np.empty((*lead, H, x.k.shape[-1], V), dtype)
    out = np.empty(0 if x.q is None else (*lead, T, table.asking, V), dtype)
    table.tokens("out", None if x.q is None else out, table.asking)
    table.states("in_state", state)
    table.states("out_state", end)
    rows = sequences(plan, prod(lead), policy.cpu_chunk(plan, T))
    if pooled:
        from_pool(rows, plan.pool_rows, mine)
    table.states("starts", end)
    own = {"out_state": end, "out": out} | ({} if state is None else {"in_state": state})
    make = _steps if is_stepwise(x, plan, rows).all() else _chunks
    at = None if plan.states_at is None else np.empty((*lead, len(plan.states_at), *end.shape[-3:]), dtype)
    if at is not None:
        if make is _steps or plan.overwrite:
            return None
        table.states("out_states", at)
        own["out_states"] = at
    walk = make(x, plan, table, state, rows, given, own, mine)
    shape, ended, asked, states = out.shape, end.shape, x.q is not None, None if at is None else at.shape
    overwrite, out_dtype = plan.overwrite, None if x.v.dtype == dtype else x.v.dtype

    def call(given: list[np.ndarray], state: Any, pointers: None = None) -> tuple[np.ndarray | None, Any] | None:
        out, end = np.empty(shape, dtype), state if mine else np.empty(ended, dtype)
        arrays = [*given, end, out] if state is None else [*given, end, out, state]
        if states is not None:
            at = np.empty(states, dtype)
            return (public(out), StatesAt(end, at)) if walk([*arrays, at]) else None
        if not walk(arrays):
            return None
        if overwrite and not mine:
            put(state, end)
            end = state
        return public(out), end

    def public(out: np.ndarray) -> np.ndarray | None:
        if not asked:
            return None
        return out if out_dtype is None else cast(plan.xp, out, out_dtype)

    return call


def _steps(x: Inputs, plan: Plan, table: Table, state: np.ndarray | None, rows: np.ndarray, given: list[np.ndarray],
           own: dict[str, np.ndarray], mine: bool) -> Walk:  # fmt: skip
    """Token by token: compiled code reads the addresses itself, and looks for memory that is shared."""
    steps = Steps(x, plan, state, rows)
    numbers = table.numbers.copy()
    sources = _sources(numbers, given, own)
    extents = np.array([_extent(y) for y in (*given, *own.values())], np.int64)
    steps.settle(numbers, sources, extents, len(given) if mine else 0)
    return lambda arrays: steps.run(handles(arrays), arrays)


def _chunks(x: Inputs, plan: Plan, table: Table, state: np.ndarray | None, rows: np.ndarray, given: list[np.ndarray],
            own: dict[str, np.ndarray], mine: bool) -> Walk:  # fmt: skip
    """Chunk by chunk."""
    chunks, template = Chunks(x, plan, table, rows, state is not None), table.numbers.copy()
    sources = _sources(template, given, own)
    filled = np.flatnonzero(sources >= 0)
    sources, count, size = sources[filled], len(given), np.dtype(plan.dtype).itemsize

    def walk(arrays: list[np.ndarray]) -> bool:
        addresses = np.array([address(y) for y in arrays])
        if mine and any(np.may_share_memory(arrays[count], y) for y in arrays[:count]):
            return False
        if (addresses % size).any():
            return False
        numbers = template.copy()
        numbers[filled, AT] = addresses[sources]
        chunks.run(numbers, arrays)
        return True

    return walk


def _sources(numbers: np.ndarray, given: list[np.ndarray], own: dict[str, np.ndarray]) -> np.ndarray:
    """Where the address of every row of the table comes from, in (given, own); it is taken out of the table."""
    order = {ROW[name]: len(given) + n for n, name in enumerate(own)}
    order[ROW["starts"]] = order[ROW["out_state"]]  # a head's state between strips waits where its final state will be
    sources = np.full(len(ARRAYS), -1, np.int64)
    for row, at in enumerate(numbers[:, AT].tolist()):
        source = order.get(row, _source(at, given))
        if source is not None:
            sources[row], numbers[row, AT] = source, 0
    return sources


def _extent(y: np.ndarray) -> tuple[int, int]:
    """First byte and the one after the last, from the address on."""
    reach = [stride * (size - 1) for stride, size in zip(y.strides, y.shape, strict=True)]
    return sum(r for r in reach if r < 0), sum(r for r in reach if r > 0) + y.itemsize


def _source(at: int, given: list[np.ndarray]) -> int | None:
    """Index of the array that begins at an address."""
    return next((i for i, y in enumerate(given) if address(y) == at), None)
