"""A call that has been made, for other arrays of the same shapes, strides and dtypes: only addresses are told anew."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np

from ...ops.cpu import array_calls
from ...ops.cpu.rounding import put
from ...runtime.arrays import cast
from ...runtime.pieces.memory import address, handles
from ...runtime.pieces.workspace import AT
from ...runtime.tracing import Trace, Untraceable
from .. import policy
from ..types import Inputs, Plan
from .chunks import Chunks
from .recurrent.short import Steps, in_place, is_one_batch, is_stepwise
from .table import ROW, Table, sequences
from .workspace import ARRAYS

Again = Callable[[list[np.ndarray], "np.ndarray | None"], "tuple[np.ndarray | None, np.ndarray] | None"]
# from handles and what they are of (given, end, out, state): False where it must be done in full
Walk = Callable[[Any, list[np.ndarray]], bool]

empty = np.empty


def record(x: Inputs, plan: Plan, state: np.ndarray | None, trace: Trace) -> Again | None:
    """The call for other arrays in place of trace.given; None where more than addresses may differ.

    x are views of them, results of the traced calls, or constants. The function gives (out, final state), or None where
    the call must be made in full: the state that is overwritten shares memory with what is read, or misaligned arrays.
    """
    if not plan.causal or not x.v.size or not x.k.size or plan.sequences[0].row is not None:
        return None
    if not all(y is None or (y.size and is_one_batch(y)) for y in x) or plan.sequences[0].stop == 0:
        return None
    try:
        places = array_calls.Places(trace)
        program = array_calls.record(trace, places) if trace.calls else None
    except Untraceable:
        return None
    if state is not None and not (state.dtype.isnative and is_one_batch(state)):  # else a copy of it was read
        return None
    (*lead, T, H, V), dtype, table = x.v.shape, np.dtype(plan.dtype), Table(x)
    mine = state is not None and in_place(x, plan, state)
    end: Any = state if mine else np.empty((*lead, H, x.k.shape[-1], V), dtype)
    out = np.empty(0 if x.q is None else (*lead, T, table.asking, V), dtype)
    table.tokens("out", None if x.q is None else out, table.asking)
    table.states("in_state", state)
    table.states("out_state", end)
    rows = sequences(plan, prod(lead), policy.cpu_chunk(plan, T))
    table.states("starts", end)
    own = {"out_state": end, "out": out} | ({} if state is None else {"in_state": state})
    given = trace.given if program is None else [*trace.given, np.empty(program.bytes, np.uint8)]
    sources = _sources(table.numbers, places, len(given), own)
    extents = np.array([_extent(y) for y in (*given, *own.values())], np.int64)
    if is_stepwise(x, plan, rows).all():
        walk = _steps(x, plan, table, state, rows, (sources, extents, len(given) if mine else 0))
    else:
        walk = _chunks(x, plan, table, state, rows, (sources, len(given), mine))
    if program is not None:
        walk = program.before(walk)
    buffer, kept = program and program.bytes, table.kept  # constants among them
    shape, ended, asked = out.shape, end.shape, x.q is not None
    overwrite, out_dtype = plan.overwrite, None if x.v.dtype == dtype else x.v.dtype

    def call(given: list[np.ndarray], state: Any, pointers: None = None, owners: Any = kept) -> Any:
        out, end = empty(shape, dtype), state if mine else empty(ended, dtype)
        if buffer:
            given = [*given, empty(buffer, np.uint8)]
        arrays = [*given, end, out] if state is None else [*given, end, out, state]
        if not walk(handles(arrays), arrays):
            return None
        if overwrite and not mine:
            put(state, end)
            end = state
        if not asked:
            return None, end
        return out if out_dtype is None else cast(plan.xp, out, out_dtype), end

    return call


def _steps(x: Inputs, plan: Plan, table: Table, state: np.ndarray | None, rows: np.ndarray,
           told: tuple[np.ndarray, np.ndarray, int]) -> Walk:  # fmt: skip
    """Token by token: compiled code reads the addresses itself, and looks for memory that is shared."""
    steps = Steps(x, plan, state, rows)
    steps.settle(table.numbers.copy(), *told)
    return steps.run


def _chunks(x: Inputs, plan: Plan, table: Table, state: np.ndarray | None, rows: np.ndarray,
            told: tuple[np.ndarray, int, bool]) -> Walk:  # fmt: skip
    """Chunk by chunk."""
    chunks, template = Chunks(x, plan, table, rows, state is not None), table.numbers.copy()
    sources, count, mine = told
    filled = np.flatnonzero(sources >= 0)
    sources, size = sources[filled], np.dtype(plan.dtype).itemsize

    def walk(row: Any, arrays: list[np.ndarray]) -> bool:
        addresses = np.array([address(y) for y in arrays])
        if mine and any(np.may_share_memory(arrays[count], y) for y in arrays[:count]):
            return False
        if (addresses % size).any():
            return False
        numbers = template.copy()
        numbers[filled, AT] += addresses[sources]
        chunks.run(numbers, arrays)
        return True

    return walk


def _sources(numbers: np.ndarray, places: array_calls.Places, count: int, own: dict[str, np.ndarray]) -> np.ndarray:
    """Which of (given, own) every row of the table lies in; the row gets its offset there. Constants keep addresses."""
    order = {ROW[name]: count + n for n, name in enumerate(own)}
    order[ROW["starts"]] = order[ROW["out_state"]]  # a head's state between strips waits where its final state will be
    sources = np.full(len(ARRAYS), array_calls.ABSOLUTE, np.int64)
    for row, at in enumerate(numbers[:, AT].tolist()):
        if row in order:
            sources[row], numbers[row, AT] = order[row], 0
        elif at:
            sources[row], numbers[row, AT] = places.at(at)
    return sources


def _extent(y: np.ndarray) -> tuple[int, int]:
    """First byte and the one after the last, from the address on."""
    reach = [stride * (size - 1) for stride, size in zip(y.strides, y.shape, strict=True)]
    return sum(r for r in reach if r < 0), sum(r for r in reach if r > 0) + y.itemsize
