"""Traced array calls as programs: tables that the compiled loop of array_calls.py executes on other arrays."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ...runtime.arrays import dtype_name
from ...runtime.pieces.memory import address, handles
from ...runtime.pieces.piece import entry, load_pieces
from ...runtime.pieces.run import OWN, Launch, launch_row, scratch
from ...runtime.tracing import MOST_STEPS, Call, Kernel, Trace, Untraceable, extent, plain
from .array_calls import (
    ABSOLUTE,
    BRAIN,
    COPY,
    EXTREME,
    HALF,
    KERNEL,
    LOOP,
    NARROW,
    ROW,
    SUM,
    WHERE,
    WIDEN,
    array_calls,
    calls_around,
    has_loops,
    inner_loop,
)


class Program(NamedTuple):
    """Recorded array calls."""

    at: int  # the table's address
    count: int  # its rows
    buffer: int  # index of the handle of the memory of all results
    owners: Any
    start: Any  # the compiled loop

    def call(self, row: array[int]) -> None:
        """Compute all results; row: handles of the given arrays, of the memory, and of arrays beside them."""
        self.start(self.at, self.count, row.buffer_info()[0], self.buffer)


Programs = tuple[Program | None, Program | None]  # before a kernel, after it


class Places:
    """Where arrays lie: (source, offset). Handles: of the given arrays, the memory of results, the end, and others."""

    def __init__(self, trace: Trace):
        self.owners: list[Any] = []
        self.buffer = len(trace.given)
        self.known = [(*extent(y), address(y), n) for n, y in enumerate((*trace.given, trace.memory))]
        self.known += [] if trace.end is None else [(*extent(trace.end), address(trace.end), self.buffer + 1)]
        self.known += [(*extent(y), address(y), self.buffer + 2 + n) for n, y in enumerate(trace.beside)]

    def of(self, y: np.ndarray) -> tuple[int, int]:
        """The place of a view; a constant has an address."""
        found = self.at(address(y))
        if found[0] == ABSOLUTE:
            self.owners.append(y)
        return found

    def at(self, place: int) -> tuple[int, int]:
        """Likewise of an address.   Raises Untraceable inside two given arrays that overlap."""
        found = [(source, place - base) for low, high, base, source in self.known if low <= place < high]
        begins = [one for one in found if one[1] == 0]
        if len(begins or found) > 1:
            raise Untraceable("arrays that overlap")
        return (begins or found or [(ABSOLUTE, place)])[0]


def record(trace: Trace, first: int = 0, last: int | None = None) -> Program | None:
    """Calls first..last of a trace; None if there are none.   Raises Untraceable for a call that it cannot express."""
    calls = trace.calls[first:last]
    if not calls:
        return None
    if not has_loops():
        raise Untraceable("no inner loops")
    load_pieces((array_calls,), "float32")
    places = Places(trace)
    rows = np.array([row for x in calls for row in _rows(x, places)], np.int64)
    start = entry(array_calls, "float32")
    return Program(address(rows), len(rows), places.buffer, (rows, places.owners), start)


def around(launch: Launch, tasks: int, programs: Programs) -> Callable[[array[int]], None]:
    """A launch by this thread between two programs, as one compiled call of the handles."""
    load_pieces((calls_around,), "float32")
    whole, buffer = entry(calls_around, "float32"), next(p.buffer for p in programs if p is not None)
    each = [(0, 0) if p is None else (p.at, p.count) for p in programs]
    told = np.array([launch.at, tasks, buffer, *each[0], *each[1]], np.int64)
    at = address(told)

    def call(row: array[int], owners: Any = (launch, told, programs)) -> None:
        _held, base = scratch.take(launch.bytes)
        whole(at, row.buffer_info()[0], base)

    return call


def place_of(trace: Trace, y: np.ndarray) -> tuple[Any, ...]:
    """(shape, dtype, offset, strides) of a result in the memory of all results.   Raises Untraceable for another."""
    source, offset = Places(trace).of(y)
    if source != len(trace.given):
        raise Untraceable("an array that is not computed")
    return y.shape, y.dtype, offset, y.strides


class Views:
    """A program, and which results of it are wanted: given arrays, views of them in C order, or results."""

    def __init__(self, program: Program | None, places: Places, trace: Trace, found: list[Any]):
        """found: the results of the recorded call.   Raises Untraceable for another kind of result."""
        arrays = [*trace.given, None, None, *trace.beside]
        self._program, self._wanted = program, [_where(arrays, places, plain(y)) for y in found]

    def run(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        """The results; arrays: the given ones, the memory of results twice, and those computed by other means."""
        if self._program is not None:
            self._program.call(handles(arrays))
        return [arrays[n] if view is None else np.ndarray(view[0], view[1], arrays[n], *view[2:])
                for n, view in self._wanted]  # fmt: skip


def _where(arrays: list[Any], places: Places, y: np.ndarray) -> tuple[int, Any]:
    """(which array holds y, the view of it that y is, None if y is that array)."""
    source, offset = places.of(y)
    if source == ABSOLUTE:
        raise Untraceable("a constant result")
    given = arrays[source]
    if given is not None and offset == 0 and (y.shape, y.strides) == (given.shape, given.strides):
        return source, None
    if given is not None and not given.flags.c_contiguous:
        raise Untraceable("a view of an array that is not in C order")
    return source, (y.shape, y.dtype, offset, y.strides)


def whole(trace: Trace, y: Any) -> Any:
    """A given array, or a result; of another view of a given array a copy."""
    if np.may_share_memory(plain(y), trace.memory) or any(is_whole(x, plain(y)) for x in trace.given):
        return y
    return trace.cast(y, y.dtype)


def is_whole(x: np.ndarray, y: Any) -> bool:
    """Whether y is all of x."""
    return x is not None and address(x) == address(y) and (x.shape, x.strides, x.dtype) == (y.shape, y.strides, y.dtype)


class Ahead:
    """The array calls of a trace so far, on a memory of results that other calls of the same trace read and continue.

    following: a trace of what comes next, whose last given array is that memory; these calls are its first ones.
    """

    def __init__(self, trace: Trace):
        self.trace, self._count = trace, len(trace.calls)
        self.following = Trace([*trace.given, trace.memory[: trace.bytes]])
        self.following.calls += trace.calls

    def words(self) -> int:
        """The size of the memory of results, an array of float64."""
        return self.trace.bytes // 8

    def after(self, found: list[Any]) -> Views:
        """The array calls since then, and which results are wanted."""
        return Views(record(self.trace, self._count), Places(self.trace), self.trace, found)


def computed(trace: Trace) -> tuple[Callable[[list[np.ndarray]], list[np.ndarray]], Trace]:
    """(what adds the results to the given arrays of a call, a trace that continues after them)."""
    program, ahead = record(trace), Ahead(trace)
    if program is None:
        return (lambda arrays: arrays), trace
    following, words = ahead.following, ahead.words()
    following.calls.clear()

    def added(arrays: list[np.ndarray]) -> list[np.ndarray]:
        each = [*arrays, np.empty(words)]
        program.call(handles(each))
        return each

    return added, following


def _kernel(call: Kernel, places: Places) -> list[int]:
    table = call.table.copy()
    found = [places.of(y) for y in call.arrays]
    table[list(call.places)] = [offset for _, offset in found]
    each = [(n, slot) for (n, _), slot in zip(found, call.places, strict=True) if n != ABSOLUTE]
    filled = np.array(each + [(OWN, slot) for slot in call.own], np.int64)
    places.owners += table, filled, call.owner
    row = [KERNEL, *launch_row(call.function, table, filled), call.tasks, *places.of(call.memory)]
    return row + [0] * (ROW - len(row))


def _rows(call: Call | Kernel, places: Places) -> list[list[int]]:
    """The rows of a call: one, or of more than three axes one for each place along the first of them."""
    if isinstance(call, Kernel):
        return [_kernel(call, places)]
    if (row := _row(call, places)) is not None:
        return [row]
    if (count := call.arrays[0].shape[0]) > MOST_STEPS:
        raise Untraceable("more than three axes")
    parts = (call._replace(arrays=tuple(y[n, ...] for y in call.arrays)) for n in range(count))
    return [row for part in parts for row in _rows(part, places)]


def _row(call: Call, places: Places) -> list[int] | None:
    """A row; None for a call with too many axes."""
    arrays = call.arrays
    if call.is_reduction:  # out, x, out
        arrays = (arrays[-1], arrays[0], arrays[-1])
    sizes, steps = _axes(arrays, call.is_reduction)
    if len(sizes) > 3:
        return None
    kind, function, data = _kind(call)
    row = [kind, function, data, *sizes, arrays[-1].itemsize, len(arrays)]
    for y, own in zip(arrays, steps, strict=True):
        row += *places.of(y), *own
    return row + [0] * (ROW - len(row))


def _kind(call: Call) -> tuple[int, int, int]:
    """(kind, function, data)."""
    if call.function == "where":
        return WHERE, 0, 0
    dtypes = tuple(y.dtype for y in call.arrays)
    if call.function == "cast" and dtypes[0] == dtypes[1] and dtypes[0].itemsize in (4, 8):
        return COPY, 0, 0
    if call.function == "cast" and dtypes[0] == dtypes[1]:
        return LOOP, *inner_loop(np.positive, dtypes)
    if call.function == "cast":
        return _cast(*call.arrays), 0, 0
    if call.is_reduction:
        return (SUM if call.function is np.add else EXTREME), *inner_loop(call.function, (dtypes[0], *dtypes))
    return LOOP, *inner_loop(call.function, dtypes)


def _cast(x: np.ndarray, out: np.ndarray) -> int:
    """The kind of a cast between dtypes."""
    names = dtype_name(x), dtype_name(out)
    kinds = {("float32", "float64"): WIDEN, ("float64", "float32"): NARROW}
    kinds |= {(n, wide): k for n, k in (("float16", HALF), ("bfloat16", BRAIN)) for wide in ("float32", "float64")}
    if names not in kinds:
        raise Untraceable(f"a cast of {names[0]} to {names[1]}")
    return kinds[names]


def _axes(arrays: tuple[np.ndarray, ...], keeps_last: bool) -> tuple[list[int], list[tuple[int, int, int]]]:
    """(sizes, steps of each array) of three axes, inner first; neighbours that are one axis everywhere are merged."""
    sizes: list[int] = []
    steps: list[list[int]] = [[] for _ in arrays]
    for axis in reversed(range(arrays[0].ndim)):
        n, own = arrays[0].shape[axis], [y.strides[axis] for y in arrays]
        if n == 1 and (sizes or not keeps_last):
            continue
        merged = sizes and not (keeps_last and len(sizes) == 1) and all(
            s == one[-1] * sizes[-1] for s, one in zip(own, steps, strict=True))  # fmt: skip
        if merged:
            sizes[-1] *= n
            continue
        sizes.append(n)
        for s, one in zip(own, steps, strict=True):
            one.append(s)
    rest = 3 - len(sizes)
    return sizes + [1] * rest, [(one + [0] * rest)[:3] for one in steps]  # type: ignore[misc]
