"""Kernels on NumPy arrays: the table of a call's arrays, and tasks that threads share out, each in its own memory."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from .. import threads
from ..arrays import dtype_name
from ..doorway import check_fields
from ..held import emptying
from ..memory import extent, shares_memory
from ..tracing import Kernel as Traced
from ..tracing import Trace
from .memory import ALIGNED, Scratch, address, first_byte, handles, place
from .piece import JIT, Whole, entry, load_pieces, piece
from .vectors import emitted, indirect_call
from .views import words
from .workspace import ARRAY, CHANNEL, CHANNELS, STORAGE, Layout, PythonWorkspace, Workspace, up

STORAGES = {name: n for n, name in enumerate(("float32", "float64", "float16", "bfloat16", "int64"))}
CONVERTED = frozenset(("converted",))  # of pieces
FUNCTION, TABLE, SIZE, PLACES, COUNT, EXTENTS, OVERWRITTEN, HANDLES, LAUNCH = range(9)  # words of a launch
OWN = -1  # a place in a thread's own memory; others are indices of handles
NOWHERE = np.empty(0, np.int64)

scratch = Scratch()
emptying.append(scratch.forget)


def stored_array(y: np.ndarray, steps: tuple[int, ...], shared: int) -> np.ndarray:
    """An array (B, T, heads, D) as a row of a table; a step of 0 along the batch shares one batch row."""
    step = y.itemsize if y.shape[-1] == 1 else steps[-1]  # of one channel any step is that of numbers side by side
    return np.array([first_byte(y), *steps[:-1], step, shared, STORAGES[dtype_name(y)], *y.shape], np.int64)


def conversions(arrays: np.ndarray, dtype: str) -> frozenset[str]:
    """CONVERTED where a call has arrays of another dtype than that of the computation, or of numbers apart.

    arrays: rows of a table, zeros for those that a call does not have.
    """
    own = (arrays[:, STORAGE] == STORAGES[dtype]) & (arrays[:, CHANNEL] == np.dtype(dtype).itemsize)
    return frozenset() if (own | (arrays[:, CHANNELS] == 0)).all() else CONVERTED


def put(declaration: Workspace, table: np.ndarray, values: Mapping[str, Any], dtype: str = "") -> np.ndarray:
    """Fields of a table: whole numbers, numbers, and matrices that lie where arrays do."""
    for name, x in values.items():
        at = declaration.slots[name]
        if isinstance(x, np.ndarray):
            # NumPy calls an array contiguous whatever the stride of an axis of length 1 is
            row = x.shape[-1] * x.itemsize if x.flags.c_contiguous else x.strides[-2]
            table[at], table[at + 1] = first_byte(x), row if declaration.matrices[name].columns else x.itemsize
        elif name in declaration.numbers:
            table[at : at + 1].view(np.float64)[0] = x
        else:
            table[at] = x
    return table


def over_matrices(kernel: Any, declaration: Workspace, values: Mapping[str, Any], tasks: int, dtype: str,
                  trace: Trace | None = None, computes: bool = True) -> Any:  # fmt: skip
    """A kernel for all tasks, shared out to threads; values: its fields, see `put`.

    trace: the kernel is one of its calls, too, and the last array of `values` its output, which is returned.
    computes: whether it is executed now.
    """
    check_fields(declaration, values, dtype)
    load_pieces((kernel,), dtype)
    table = put(declaration, np.zeros(declaration.size, np.int64), values)
    compiled = entry(kernel, dtype) if JIT else _in_python(kernel, declaration, dtype)

    def work(first: int, last: int, owners: Any = (table, values)) -> None:
        compiled(first_byte(table), first, last)

    if tasks == 1 and computes:
        work(0, 1)
    elif computes:
        threads.run(work, tasks, threads.num_threads())
    if trace is None:
        return None
    arrays = {name: y for name, y in values.items() if isinstance(y, np.ndarray)}
    places = tuple(declaration.slots[name] for name in arrays)
    return trace.kernel(Traced(kernel.piece.addresses[dtype], table, places, tuple(arrays.values()), tasks))


# launches


@piece
def meet(told: Whole, extents: Whole, n: Whole, m: Whole) -> Whole:
    """Whether two arrays reach into each other.

    told: handles; extents: of each array the first byte and the one after the last, from its first element on.
    """
    own, other = words(extents, 2 * n + 2), words(extents, 2 * m + 2)
    at, there = words(words(told, n + 1)[n], 1)[0], words(words(told, m + 1)[m], 1)[0]
    return 1 if there + other[2 * m] < at + own[2 * n + 1] and at + own[2 * n] < there + other[2 * m + 1] else 0


_python_kernels: dict[int, Callable[..., None]] = {}  # by what stands for the address of a function


@emitted(lambda function, table, first, last: _python_kernels[int(function)](table, first, last))
def call_kernel(b: Any, function: Any, table: Any, first: Any, last: Any) -> None:
    """function(table, first, last)."""
    indirect_call(b, function, [table, first, last])


@piece
def start(launch: Whole, told: Whole, base: Whole, first: Whole, last: Whole):
    """Tasks first..last of a launch, on a copy of its table at `base`, with the addresses of memory behind it.

    told: handles. If what is overwritten reaches into one of the arrays before it, nothing is done but to write 1
    behind the handles.
    """
    own = words(launch, LAUNCH)
    written, extents = own[OVERWRITTEN], own[EXTENTS]
    for n in range(written):
        if meet(told, extents, n, written):
            words(told, own[HANDLES] + 1)[own[HANDLES]] = 1
            return
    template, table, places = words(own[TABLE], own[SIZE]), words(base, own[SIZE]), words(own[PLACES], 2 * own[COUNT])
    for n in range(own[SIZE]):
        table[n] = template[n]
    for n in range(own[COUNT]):
        source, at = places[2 * n], base
        if source != OWN:
            at = words(words(told, source + 1)[source], 1)[0]
        table[places[2 * n + 1]] += at
    call_kernel(own[FUNCTION], base, first, last)


def launch_row(function: int, table: np.ndarray, places: np.ndarray, extents: np.ndarray = NOWHERE,
               overwritten: int = 0) -> list[int]:  # fmt: skip
    """The words of a launch; the arrays must outlive it."""
    return [function, address(table), table.size, address(places), len(places), address(extents), overwritten,
            len(extents)]  # fmt: skip


class Launch:
    """A kernel on the arrays of a call, or on others that handles tell."""

    def __init__(self, kernel: Kernel, arrays: np.ndarray, sources: np.ndarray = NOWHERE, extents: np.ndarray = NOWHERE,
                 overwritten: int = 0):  # fmt: skip
        """arrays: rows of a table.   sources: of each the handle to whose address it is added, or -1.

        extents: of what each handle is of, from its first element to its first byte and the one after the last.
        overwritten: the handle of what is, after those of all that is read; 0: none.
        """
        table, own, told = kernel.table_of(arrays), kernel.layout.own, np.flatnonzero(sources >= 0)
        places = np.full((len(own) + len(told), 2), OWN, np.int64)
        places[:, 1] = *own, *(kernel.first + ARRAY * told)
        places[len(own) :, 0] = sources[told]
        row = np.array(launch_row(kernel.function, table, places, extents, overwritten), np.int64)
        self.at, self.bytes, self.owners = address(row), kernel.bytes, (row, table, places, extents, kernel)
        self._start: Any = entry(start, "float32") if JIT else start

    def __call__(self, told: int, first: int, last: int) -> None:
        _held, base = scratch.take(self.bytes)
        self._start(self.at, told, base, first, last)


class Kernel:
    """A kernel of (first task, last task), whose matrices lie in a thread's own memory, and its tasks."""

    tasks: np.ndarray
    bounds: list[int]
    each = count = 1

    def __init__(self, body: Any, declaration: Workspace, dtype: str, layout: Layout, numbers: Mapping[str, float],
                 words: frozenset[str]):  # fmt: skip
        load_pieces((body,), dtype, words)
        load_pieces((start,), "float32")
        self.dtype, self.declaration, self.layout, self.numbers = dtype, declaration, layout, numbers
        self.first, self._behind = declaration.slots[declaration.arrays[0]], up(8 * layout.table.size, ALIGNED)
        self.bytes = self._behind + layout.bytes
        if JIT:
            self.function = body.piece.addresses[dtype]
        else:
            self.function = id(self)
            _python_kernels[id(self)] = _in_python(body, declaration, dtype)

    def over(self, tasks: np.ndarray, bounds: list[int], each: int, count: int) -> Kernel:
        """Tasks bounds[n]..bounds[n + 1] are executed in turn by one of `count` threads, `each` at a time."""
        self.tasks, self.bounds, self.each, self.count = tasks, bounds, each, count
        return self

    def table_of(self, arrays: np.ndarray) -> np.ndarray:
        """The table, with the places of its matrices behind it; arrays: rows of it."""
        table = self.layout.placed(self._behind)
        put(self.declaration, table, {**self.numbers, "tasks": self.tasks, "tasks_count": len(self.tasks)})
        table[self.first : self.first + arrays.size] = arrays.reshape(-1)
        return table

    def traced(self, rows: np.ndarray, arrays: Mapping[str, np.ndarray]) -> Traced:
        """All tasks, on arrays of a trace by name, as one of its calls; rows: of the table."""
        places = tuple(self.declaration.slots[name] for name in arrays)
        return Traced(self.function if JIT else 0, self.table_of(rows), places, tuple(arrays.values()),
                      len(self.tasks), tuple(self.layout.own), self.bytes, self)  # fmt: skip

    def run(self, arrays: np.ndarray, owners: Any) -> None:
        """All tasks, on arrays that `owners` keeps alive."""
        self.execute(Launch(self, arrays), owners)

    def execute(self, launch: Launch, owners: Any, told: array[int] | None = None) -> None:
        """All tasks of a launch; told: handles."""
        bounds, each, at = self.bounds, self.each, 0 if told is None else place(told)
        if self.is_alone:
            launch(at, bounds[0], bounds[-1])
            return

        def task(first: int, last: int, owners: Any = (launch, told, owners)) -> None:
            for n in range(bounds[first], bounds[last], each):
                if threads.cancelled():
                    break
                launch(at, n, min(n + each, bounds[last]))

        threads.run(task, len(bounds) - 1, self.count)

    @property
    def is_alone(self) -> bool:
        """Whether the calling thread executes all tasks at once."""
        return self.count == 1 and self.each >= len(self.tasks)


def _in_python(body: Any, declaration: Workspace, dtype: str) -> Callable[..., None]:
    """A kernel that is not compiled, of the address of its table."""
    return lambda at, *tasks: body(PythonWorkspace(declaration, words(at, declaration.size), dtype), *tasks)


# arrays that a recorded call overwrites and others


@piece
def spans_meet(told: Whole, extents: Whole, parts: Whole, count: Whole):
    """Write 1 behind the handles if one of the first `parts` arrays reaches into another one."""
    found = 0
    for n in range(parts):
        for m in range(n + 1, count):
            found |= meet(told, extents, n, m)
    words(told, count + 1)[count] = found


class Overlap:
    """shares_memory(parts, arrays) of arrays with the shapes and strides of these."""

    def __init__(self, parts: Sequence[Any], arrays: Sequence[np.ndarray]):
        each = [extent(y.shape, y.strides, y.itemsize) for y in (*parts, *arrays)]
        self._extents, self._parts, self._count = np.array(each, np.int64), len(parts), len(each)
        load_pieces((spans_meet,), "float32")
        self._meet: Any = entry(spans_meet, "float32")
        self._at = address(self._extents)

    def __call__(self, parts: Sequence[Any], arrays: list[np.ndarray]) -> bool:
        return self.meets(parts, arrays) and shares_memory(parts, arrays)

    def meets(self, parts: Sequence[Any], arrays: list[np.ndarray]) -> bool:
        """Whether the memory from the first byte to the last of a part overlaps another one's, also without sharing."""
        row = handles([*parts, *arrays])
        self._meet(place(row), self._at, self._parts, self._count)
        return bool(row[self._count])
