"""Kernels on NumPy arrays: the table of a call's arrays, and tasks that threads share out, each in its own memory."""

from __future__ import annotations

import copy
import functools
import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numba import types

from .. import threads
from ..arrays import dtype_name
from ..doorway import check_fields
from ..recorder import active
from .memory import address, first_byte, scratch
from .piece import JIT, Whole, entry, load_pieces, piece
from .vectors import emitted, indirect_call, word
from .views import words
from .workspace import ARRAY, AT, CHANNEL, CHANNELS, STORAGE, Layout, PythonWorkspace, Workspace

STORAGES = {name: n for n, name in enumerate(("float32", "float64", "float16", "bfloat16", "int64"))}
CONVERTED = frozenset(("converted",))  # of pieces
MOST_BOUNDS = 1024  # of the tasks of a launch: neighbouring tasks of more are done in turn
PARTS = 16  # in which a launch is shared out to each thread
OWN = -1  # a place in a thread's own memory; others are indices of handles


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
    """Fields of a table: whole numbers, numbers, arrays (B, T, heads, D), and matrices that lie where arrays do."""
    for name, x in values.items():
        at = declaration.slots[name]
        if name in declaration.arrays:
            table[at : at + ARRAY] = stored_array(x, x.strides, 1)
        elif isinstance(x, np.ndarray):
            # NumPy calls an array contiguous whatever the stride of an axis of length 1 is
            row = x.shape[-1] * x.itemsize if x.flags.c_contiguous else x.strides[-2]
            table[at], table[at + 1] = first_byte(x), row if declaration.matrices[name].columns else x.itemsize
        elif name in declaration.numbers:
            table[at : at + 1].view(np.float64)[0] = x
        else:
            table[at] = x
    return table


def over_matrices(
    kernel: Any, declaration: Workspace, values: Mapping[str, Any], tasks: int, dtype: str, is_small: bool = False,
    of: frozenset[str] | None = None,
) -> None:  # fmt: skip
    """A kernel for all tasks, shared out to threads; values: its fields, see `put`. is_small: one thread is enough.

    of: words of the call, see `function_of`.
    """
    check_fields(declaration, values, dtype)
    table = put(declaration, np.zeros(declaration.size, np.int64), values)
    slots = [declaration.slots[name] for name, y in values.items() if isinstance(y, np.ndarray) and y.size]
    share = max(tasks, 1) if is_small else -(-tasks // MOST_BOUNDS) or 1
    layout, bounds = (table, list[int](), table.nbytes), [*range(0, tasks, share), tasks]
    Launch(function_of(kernel, declaration, dtype, of), layout, bounds, max(tasks, 1), slots, values).run()


@functools.cache
def function_of(body: Any, declaration: Workspace, dtype: str, of: frozenset[str] | None = None) -> int:
    """The address of a kernel, loaded for calls with the words `of`; in Python a number that stands for it."""
    load_pieces((body,), dtype, of)
    if JIT:
        return body.piece.addresses[dtype]

    def compute(at: int, *tasks: int) -> None:
        body(PythonWorkspace(declaration, words(at, declaration.size), dtype), *tasks)

    _python_kernels[id(compute)] = compute
    return id(compute)


# launches

FUNCTION, TABLE, SIZE, PLACES, COUNT, LAUNCH = range(6)  # words of a launch

_python_kernels: dict[int, Callable[..., None]] = {}  # by what stands for the address of a function


@emitted(lambda function, table, first, last: _python_kernels[int(function)](table, first, last))
def call_kernel(b: Any, function: Any, table: Any, first: Any, last: Any) -> None:
    """function(table, first, last)."""
    indirect_call(b, function, [table, first, last])


_counting = threading.Lock()


def _added(at: int, n: int) -> int:
    with _counting:
        before = int(words(at, 1)[0])
        words(at, 1)[0] = before + n
    return before


@emitted(_added, types.int64)
def add_at(b: Any, at: Any, n: Any) -> Any:
    """Add n to the word at an address in one step, whatever other threads do, and return what it was."""
    return b.atomic_rmw("add", word(b, at, 0), n, "acq_rel")


def _now(at: int) -> int:
    time.sleep(0)  # other threads go on
    return int(words(at, 1)[0])


@emitted(_now, types.int64)
def now_at(b: Any, at: Any) -> Any:
    """The word at an address, and with it all that was written before another thread added to it."""
    return b.load_atomic(word(b, at, 0), "acquire", 8)


@piece
def start(launch: Whole, handles: Whole, base: Whole, first: Whole, last: Whole):
    """Tasks first..last of a launch, on a copy of its table at `base`, with the addresses of its arrays."""
    own = words(launch, LAUNCH)
    template, table, places = words(own[TABLE], own[SIZE]), words(base, own[SIZE]), words(own[PLACES], 2 * own[COUNT])
    for n in range(own[SIZE]):
        table[n] = template[n]
    for n in range(own[COUNT]):
        source, at = places[2 * n], base
        if source != OWN:
            at = words(words(handles, source + 1)[source], 1)[0]
        table[places[2 * n + 1]] += at
    call_kernel(own[FUNCTION], base, first, last)


@functools.cache
def starter() -> Any:
    """The loaded `start`."""
    load_pieces((start,), "float32")
    return entry(start, "float32") if JIT else start


class Launch:
    """A kernel, the table of its fields, and its tasks.

    Tasks bounds[n]..bounds[n + 1] are executed in turn by one thread, `each` at a time; threads share out the n.
    A launch that is made where there is one thread has one n.
    slots: the fields of the table that are addresses of arrays. owners: what keeps them, and the tasks, alive.
    """

    def __init__(self, function: int, layout: Layout, bounds: list[int], each: int, slots: Sequence[int] = (),
                 owners: Any = None, fixed: Any = None):  # fmt: skip
        """fixed: owners that a launch on other arrays has too."""
        self.function, self.each = function, each
        self.bounds = bounds if len(bounds) == 2 or threads.num_threads() > 1 else [bounds[0], bounds[-1]]
        self.slots, self.owners, self._fixed = slots, owners, fixed
        self.table, self._own, self.bytes = layout
        self._places(np.empty((0, 2), np.int64), self.table)

    @property
    def is_one_task(self) -> bool:
        """Whether the calling thread executes all tasks at once."""
        return len(self.bounds) <= 2 and self.bounds[0] + self.each >= self.bounds[-1]

    @property
    def is_brief(self) -> bool:
        """Whether the kernel is called once for each bounds[n]..bounds[n + 1]."""
        return all(last - first <= self.each for first, last in itertools.pairwise(self.bounds))

    @property
    def part(self) -> int:
        """How many of the n a thread takes at a time."""
        widest = max((last - first for first, last in itertools.pairwise(self.bounds)), default=0)
        return max(1, min((len(self.bounds) - 1) // (PARTS * threads.num_threads()), self.each // max(widest, 1)))

    @property
    def nbytes(self) -> int:
        """Bytes of its table, and of the tasks and other arrays that no call owns."""
        fixed = self._fixed.values() if isinstance(self._fixed, Mapping) else ()
        return self.table.nbytes + sum(y.nbytes for y in fixed if isinstance(y, np.ndarray))

    def _places(self, sources: np.ndarray, table: np.ndarray) -> None:
        """sources: rows (handle, field), to which the address of the handle's array is added."""
        places = np.array([*([OWN, at] for at in self._own), *sources], np.int64).reshape(-1, 2)
        row = np.array([self.function, address(table), table.size, address(places), len(places)], np.int64)
        self.at, self._alive = address(row), (row, table, places)
        self._start = starter()

    def with_arrays(
        self, declaration: Workspace, arrays: np.ndarray, owners: Any, matrices: Mapping[str, np.ndarray] | None = None
    ) -> Launch:
        """The launch on arrays that `owners` keeps alive; arrays: rows of a table. matrices: those of the call."""
        table, first = self.table.copy(), declaration.slots[declaration.arrays[0]]
        table[first : first + arrays.size] = arrays.reshape(-1)
        slots = [first + ARRAY * n for n in np.flatnonzero(arrays[:, AT] * (arrays[:, CHANNELS] > 0))]
        put(declaration, table, matrices or {})
        slots += [declaration.slots[name] for name, y in (matrices or {}).items() if y.size]
        layout = table, self._own, self.bytes
        return Launch(self.function, layout, self.bounds, self.each, slots, owners, self._fixed)

    def on(self, sources: Sequence[tuple[int, int, int]]) -> Launch:
        """The launch with other arrays; sources: (field, handle, offset) of each."""
        table, found = self.table.copy(), copy.copy(self)
        for at, _, offset in sources:
            table[at] = offset
        found.owners = None  # the arrays of the recorded call may be freed
        found._places(np.array([(n, at) for at, n, _ in sources], np.int64).reshape(-1, 2), table)
        return found

    def run(self) -> None:
        """All tasks, on the arrays of the table."""
        self.execute(0)
        if active.recorder is not None:
            active.recorder.launches.append(self)

    def execute(self, handles: int) -> None:
        """All tasks; handles: address of a row of handles."""
        bounds, each = self.bounds, self.each
        if self.is_one_task:
            self(handles, bounds[0], bounds[-1])
            return

        def task(first: int, last: int) -> None:
            end = bounds[last]
            for n in range(bounds[first], end, each):
                if threads.cancelled():
                    break
                self(handles, n, min(n + each, end))

        threads.run(task, len(bounds) - 1, threads.num_threads())

    def __call__(self, handles: int, first: int, last: int) -> None:
        _held, base = scratch(self.bytes)
        self._start(self.at, handles, base, first, last)


def launch_of(body: Any, declaration: Workspace, dtype: str, layout: Layout, values: Mapping[str, Any],
              words: frozenset[str], bounds: list[int], each: int) -> Launch:  # fmt: skip
    """A kernel, whose matrices lie in a thread's own memory, without the arrays of a call; values: see `put`."""
    table, own, size = layout
    layout = put(declaration, table.copy(), values), own, size
    return Launch(function_of(body, declaration, dtype, words), layout, bounds, each, fixed=values)
