"""A call that has been made, for other arrays of the same shapes, strides and dtypes: only addresses are told anew."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np

from ...core import StatesAt
from ...ops.cpu import programs
from ...ops.cpu.formulas import put
from ...runtime.arrays import cast
from ...runtime.pieces.memory import destinations, empty, first_byte, handles
from ...runtime.pieces.run import Kernel, Launch
from ...runtime.pieces.workspace import AT
from ...runtime.tracing import Kernel as ArrayKernel
from ...runtime.tracing import Trace, Untraceable, contains, extent, plain
from ..readouts.systems import Solver
from ..types import Inputs, Plan
from .forms import Made, chunks, in_place, is_one_batch, is_stepwise, steps
from .table import ROW, Table, from_pool, sequences
from .workspace import ARRAYS

ndarray = np.ndarray
Again = Callable[[list[np.ndarray], "np.ndarray | None"], "tuple[np.ndarray | None, np.ndarray] | None"]
Then = Callable[["np.ndarray | None", np.ndarray], tuple[Any, Any]]
# from handles and what they are of (given, memory, end, out, state): False where it must be done in full
Loops = Callable[[Any, list[np.ndarray]], bool]


def record(x: Inputs, plan: Plan, state: np.ndarray | None, trace: Trace, then: Then | None = None,
           solver: Solver | None = None) -> Again | None:  # fmt: skip
    """The call for other arrays in place of trace.given; None where more than addresses may differ.

    Raises Untraceable for array calls that cannot be listed.

    x are views of them, results of the traced calls, or constants; so may be the state. then(out, end): what is made of
    the output and the final state, traced too; end is an array or a tuple, and a final state that it converts takes
    the place of `end`. The function gives (out, final state), or None where the call must be made in full: the state
    that is overwritten shares memory with what is read, or misaligned arrays.
    """
    if not plan.causal or not x.v.size or not x.k.size:
        return None
    if plan.sequences[0].row is not None:
        return None
    if not all(y is None or (y.size and is_one_batch(y)) for y in x) or plan.sequences[0].stop == 0:
        return None
    if state is not None and not (state.dtype.isnative and is_one_batch(state)):  # else a copy of it was read
        return None
    if plan.states_at is not None and (plan.overwrite or then is not None):
        return None
    mine = state is not None and in_place(x, plan, state)
    if plan.pool_rows is not None and plan.overwrite and not mine:  # rows are scattered afterwards
        return None
    made = Made.of(x, plan, state, mine)
    count = len(trace.calls)
    out, end = None if made.out is None else trace.added(made.out), trace.ended(made.end)
    final = None if then is None else then(out, end)
    if final is not None and out is not None:
        final = _in_place_of(out, final[0]), final[1]
    return _call(x, plan, state, trace, (made, mine, final, solver), count)


def _in_place_of(out: Any, found: Any) -> Any:
    """The output, in the memory of the core's where it has its shape and dtype."""
    if (found.shape, found.dtype) != (out.shape, out.dtype) or found.trace is None or plain(found) is plain(out):
        return found
    return found.trace.into(found, out)


def _call(x: Inputs, plan: Plan, state: Any, trace: Trace, computed: tuple[Made, bool, Any, Any], count: int) -> Any:
    """The function of other arrays; count: of the array calls before the loops."""
    made, mine, final, solver = computed
    table, end, out, at = made
    places, dtype = programs.Places(trace), np.dtype(plan.dtype)
    packed = state is not None and contains(trace.memory, state)  # made from the given arrays
    buffer = trace.bytes if trace.is_used or final is not None else 0
    given = [*trace.given, trace.memory[:buffer]] if buffer else trace.given
    own = {"starts": end, "out": np.empty(0, dtype) if out is None else out}
    own |= {} if state is None or packed else {"in_state": state}
    own |= {} if at is None else {"out_states": at}
    run = _loops_of(x, plan, table, given, own, mine, (trace, count, solver))
    shape, ended, has_queries = own["out"].shape, end.shape, out is not None
    overwrite, out_dtype = plan.overwrite and not packed, None if x.v.dtype == dtype or solver else x.v.dtype
    out_there, end_there = (
        (None, None)
        if final is None
        else (_result(y, places, own) for y, own in zip(final, (made.out, made.end), strict=True))
    )
    states, fn = None if at is None else at.shape, plan.xp

    def call(given: list[np.ndarray], state: Any, pointers: None = None) -> Any:
        make = np.empty if destinations.arrays is None else empty
        out = (np.empty if out_there else make)(shape, dtype)
        end = state if mine else (np.empty if end_there else make)(ended, dtype)
        arrays = [*given, np.empty(buffer // 8), end, out] if buffer else [*given, end, out]
        if state is not None and not packed:
            arrays.append(state)
        if states is not None:
            arrays.append(np.empty(states, dtype))
        if not run(handles(arrays), arrays):
            return None
        if end_there is not None:
            end = end_there(arrays)
        if overwrite and end is not state and type(end) is np.ndarray:
            put(state, end)
            end = state
        return public(out, arrays), end if states is None else StatesAt(end, arrays[-1])

    def public(out: np.ndarray, arrays: list[np.ndarray]) -> Any:
        if not has_queries:
            return None
        if out_there is not None:
            return out_there(arrays)
        return out if out_dtype is None else cast(fn, out, out_dtype)

    return call


def _result(y: Any, places: programs.Places, own: Any) -> Any:
    """A function of the arrays of a call that makes a result, or a tuple of them; None if it is the core's own."""
    if isinstance(y, tuple):
        each = [_view_of(part, places) for part in y]
        return lambda arrays: tuple([ndarray(shape, dtype, arrays[n], at, s) for n, shape, dtype, at, s in each])
    if y is None or programs.is_whole(own, plain(y)):
        return None
    n, shape, dtype, at, steps = _view_of(y, places)
    return lambda arrays: ndarray(shape, dtype, arrays[n], at, steps)


def _view_of(y: Any, places: programs.Places) -> tuple[int, tuple[int, ...], np.dtype, int, tuple[int, ...]]:
    """(the array that it lies in, shape, dtype, offset, strides) of a result."""
    n, offset = places.of(plain(y))
    if n == programs.ABSOLUTE:
        raise Untraceable("a constant result")
    return n, y.shape, y.dtype, offset, y.strides


def _loops_of(x: Inputs, plan: Plan, table: Table, given: list[np.ndarray], own: dict[str, np.ndarray],
              mine: bool, traced: tuple[Trace, int, Solver | None]) -> Loops:  # fmt: skip
    """The compiled loops of a call, between array calls; mine: the state is overwritten."""
    trace, count, solver = traced
    rows = sequences(plan, prod(x.v.shape[:-3]))
    if plan.pool_rows is not None:
        from_pool(rows, plan.pool_rows.at, mine)
    stepwise, rotation = solver is None and is_stepwise(x, plan, rows).all(), None
    if stepwise and (x.q is None or x.q.shape[-2] <= x.v.shape[-2]):  # the state is read once, before it is rotated
        rotation, count = _rotation_of(trace, count)
    if rotation is not None:
        table.constant("in_rotation", rotation)
    calls = programs.record(trace, 0, count), programs.record(trace, count)
    kernel = steps(x, plan, table, rows) if stepwise else chunks(x, plan, table, rows, solver=solver)
    return loops(kernel, table, trace, (given, own), len(given) if mine else 0, calls, not stepwise)


def _rotation_of(trace: Trace, count: int) -> tuple[np.ndarray | None, int]:
    """(cosines and sines (2, P), how many calls are before the loops) where the first calls rotate the final state.

    That call is removed: the loops rotate. None without such a call, or if angles depend on what the loops compute.
    """
    for n, call in enumerate(trace.calls[count:], count):
        if isinstance(call, ArrayKernel) and trace.end is not None and contains(trace.end, call.arrays[-1]):
            del trace.calls[n]
            return call.arrays[1], n
        if isinstance(call, ArrayKernel) or any(contains(y, x) for x in call.arrays for y in trace.beside):
            break
    return None, count


def loops(kernel: Kernel, table: Table, trace: Trace, arrays: tuple[list[np.ndarray], dict[str, np.ndarray]],
          overwritten: int = 0, calls: programs.Programs = (None, None), aligned: bool = True) -> Loops:  # fmt: skip
    """A kernel for other arrays: given ones, and own ones by their rows of the table.

    overwritten: the index of the state that is, after all that is read; 0: none is.   aligned: only for aligned arrays.
    """
    (given, own), numbers, (before, after) = arrays, table.numbers.copy(), calls
    sources, reached = sources_of(numbers, programs.Places(trace), len(given), own), [*given, *own.values()]
    extents = np.array([extent(y) for y in reached]) - np.array([[first_byte(y)] for y in reached])
    constants = [y for name, y in table.kept.items() if sources[ROW[name]] == programs.ABSOLUTE and name not in own]
    launch, size = Launch(kernel, numbers, sources, extents, overwritten), np.dtype(kernel.dtype).itemsize
    whole = programs.around(launch, len(kernel.tasks), calls) if kernel.is_alone and calls != (None, None) else None

    def run(row: Any, arrays: list[np.ndarray], owners: Any = constants) -> bool:
        if aligned and any(first_byte(y) % size for y in arrays):
            return False
        if whole is not None:
            whole(row)
            return not row[len(arrays)]
        if before is not None:
            before.call(row)
        kernel.execute(launch, arrays, row)
        done = not row[len(arrays)]
        if done and after is not None:
            after.call(row)
        return done

    return run


def sources_of(numbers: np.ndarray, places: programs.Places, count: int, own: dict[str, np.ndarray]) -> np.ndarray:
    """Which of (given, own) every row of the table lies in; the row gets its offset there. Constants keep addresses."""
    order = {ROW[name]: count + n for n, name in enumerate(own)}
    sources = np.full(len(ARRAYS), programs.ABSOLUTE, np.int64)
    for row, at in enumerate(numbers[:, AT].tolist()):
        if row in order:
            sources[row], numbers[row, AT] = order[row], 0
        elif at:
            sources[row], numbers[row, AT] = places.at(at)
    return sources
