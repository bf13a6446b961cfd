"""Recorded kernels on other NumPy arrays: the addresses in their tables change, and all else stays.

    sequence = LaunchSequence(recorder, given)     raises LookupError if NumPy computed a part of the call
    arrays = sequence.run(other given arrays)      these, and new arrays in the place of the allocated ones

A kernel takes an array by the address of its first element. The address lies in a given array, in an array of `empty`
(memory.py), or in a constant (recorder.py). Another address is of an array that NumPy computed.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ..memory import extent
from ..recorder import Recorder
from .memory import ALIGNED, address, destinations, empty, first_byte, handles, place
from .piece import JIT, Whole, entry, load_pieces, piece
from .run import Launch, scratch, start
from .views import words
from .workspace import up

BYTE = np.dtype(np.uint8)
LARGE = 1 << 18  # bytes; smaller results have new memory: that of the pool costs microseconds
SHARED = 1 << 14  # bytes; smaller arrays between kernels share a buffer
NOWHERE = 1 << 62  # as an extent, of an array that is not compared
LAUNCHES, COUNT, ARRAYS, EXTENTS, OVERWRITTEN, PARTS, HEAD = range(7)  # words of a sequence


@piece
def meet(handles: Whole, extents: Whole, n: Whole, m: Whole) -> Whole:
    """Whether two arrays reach into each other.

    extents: of each array the first byte and the one after the last, from its first element on, and its item size.
    """
    own, other = words(extents + 24 * n, 3), words(extents + 24 * m, 3)
    at, there = words(words(handles, n + 1)[n], 1)[0], words(words(handles, m + 1)[m], 1)[0]
    return 1 if there + other[0] < at + own[1] and at + own[0] < there + other[1] else 0


@piece
def is_refused(sequence: Whole, handles: Whole) -> Whole:
    """Whether an array that is overwritten reaches into another one, or an array does not begin at its item size."""
    s = words(sequence, HEAD)
    parts = words(s[OVERWRITTEN], s[PARTS])
    for n in range(s[ARRAYS]):
        at, item = words(words(handles, n + 1)[n], 1)[0], words(s[EXTENTS] + 24 * n, 3)[2]
        if at % item != 0:
            return 1
        for j in range(s[PARTS]):
            if parts[j] != n and meet(handles, s[EXTENTS], parts[j], n):
                return 1
    return 0


@piece
def check(sequence: Whole, handles: Whole, flag: Whole):
    """Write 1 to the word `flag` behind the handles where the launches must not be executed."""
    words(handles, flag + 1)[flag] = is_refused(sequence, handles)


@piece
def execute(sequence: Whole, handles: Whole, base: Whole, flag: Whole):
    """All tasks of all launches, by this thread, unless they are refused; base: working memory."""
    if is_refused(sequence, handles):
        words(handles, flag + 1)[flag] = 1
        return
    s = words(sequence, HEAD)
    for n in range(s[COUNT]):
        one = words(s[LAUNCHES] + 24 * n, 3)
        start(one[0], handles, base, one[1], one[2])


@functools.cache
def loops() -> tuple[Any, Any]:
    """The loaded `execute` and `check`."""
    load_pieces((execute, check), "float32")
    return (entry(execute, "float32"), entry(check, "float32")) if JIT else (execute, check)


class Span(NamedTuple):
    """An array of a call: the bytes that it reaches over."""

    first: int
    last: int
    begin: int  # address of the first element

    @classmethod
    def of(cls, y: np.ndarray) -> Span:
        low, high = extent(y.shape, y.strides, y.itemsize)
        begin = first_byte(y)
        return cls(begin + low, begin + high, begin)


class LaunchSequence:
    """The kernels of a call on other arrays of the same layout; `empty` made all arrays that are not given."""

    def __init__(self, recorder: Recorder, given: Sequence[np.ndarray], overwritten: Collection[int] = (),
                 within: Collection[int] = (), results: Sequence[np.ndarray] | None = None):  # fmt: skip
        """overwritten: indices of given arrays that the kernels write to. within: of columns of these arrays.

        results: arrays in whose memory the results lie, all by default; other small allocated ones share one buffer.
        Raises LookupError unless the kernels are all that the call computed.
        """
        if recorder.obstacle:
            raise LookupError(recorder.obstacle)
        if not recorder.launches:
            raise LookupError("no compiled kernel computed the call")
        results = recorder.allocated if results is None else results
        known, places, self._buffer = {id(y) for y in results}, list[int](), 0
        rest = [y for y in recorder.allocated if id(y) not in known]
        apart, shared = ([y for y in rest if (y.nbytes < SHARED) == is_small] for is_small in (False, True))
        for y in shared:
            places.append(self._buffer)
            self._buffer += up(y.nbytes, ALIGNED)
        own = [*results, *apart]
        first, pool = len(given) + len(own), [*given, *own, *shared]
        constants = [*{id(y): y for y in recorder.constants}.values()]
        if len({first_byte(y) for y in pool if y.size}) < sum(y.size > 0 for y in pool):
            raise LookupError("two arrays begin at one place")
        spans = [Span.of(y) for y in (*pool, *constants)]
        self._launches: list[Launch] = []
        used = set[int]()
        for launch in recorder.launches:
            found = [(slot, *_source(int(launch.table[slot]), spans, len(pool))) for slot in launch.slots]
            used |= {n for _, n, _ in found}
            moved = [(slot, n, at) if n < first else (slot, first, at + places[n - first])
                     for slot, n, at in found if n < len(pool)]  # fmt: skip
            self._launches.append(launch.on(moved))
        if not used.issuperset(n for n in range(len(given), len(pool)) if pool[n].size):
            raise LookupError("an array was allocated for something else than a kernel")
        self.read = {n for n in used if n < len(given)}  # indices of the given arrays that the kernels take
        self.allocations = [(y.shape, y.dtype) for y in own]
        self._makers = [(empty if prod(shape) * dtype.itemsize >= LARGE else np.empty, shape, dtype)
                        for shape, dtype in self.allocations]  # fmt: skip
        extents = [[*extent(y.shape, y.strides, y.itemsize), y.itemsize] for y in given]
        for n in within:
            extents[n][:2] = NOWHERE, NOWHERE
        self._prepare(np.array(extents, np.int64), np.array(sorted(overwritten), np.int64), constants)

    def _prepare(self, extents: np.ndarray, parts: np.ndarray, constants: Sequence[np.ndarray]) -> None:
        """The words that the compiled loop reads."""
        alone = [one for one in self._launches if one.tasks.are_one]
        self._is_alone, self._bytes = len(alone) == len(self._launches), max(one.bytes for one in self._launches)
        rows = np.array([[one.at, one.tasks.bounds[0], one.tasks.bounds[-1]] for one in self._launches], np.int64)
        table = np.array(
            [address(rows), len(rows), len(extents), address(extents), address(parts), len(parts)], np.int64
        )
        self._at, self._alive = address(table), (extents, rows, parts, table, list(constants))
        self._execute, self._check = loops()

    def run(self, given: list[np.ndarray], pointers: None = None) -> list[np.ndarray] | None:
        """The given arrays and those of `allocations`, filled; None if the call must be computed in full."""
        if destinations.arrays is None:
            arrays = given + [make(shape, dtype) for make, shape, dtype in self._makers]
        else:
            arrays = given + [empty(shape, dtype) for shape, dtype in self.allocations]
        if self._buffer:
            arrays.append(np.empty(self._buffer, BYTE))
        row, count = handles(arrays), len(arrays)
        at = place(row)
        if self._is_alone:
            _held, base = scratch.take(self._bytes)
            self._execute(self._at, at, base, count)
            return None if row[count] else arrays
        self._check(self._at, at, count)
        if row[count]:
            return None
        for launch in self._launches:
            launch.execute(at)
        return arrays


def _source(at: int, spans: Sequence[Span], count: int) -> tuple[int, int]:
    """(index, offset) of the array that an address lies in; those from index `count` on are constants.

    Raises LookupError if it lies in none, or in several.
    """
    found = [n for n, span in enumerate(spans) if span.begin == at]
    found = found or [n for n, span in enumerate(spans) if span.first <= at < span.last]
    if not found or (len(found) > 1 and found[0] < count):
        raise LookupError("NumPy computed an array of the call" if not found else "two arrays overlap")
    return found[0], at - spans[found[0]].begin


class View(NamedTuple):
    """An array that the caller gets: a view of one of the pool."""

    of: int
    shape: tuple[int, ...]
    dtype: np.dtype
    offset: int
    strides: tuple[int, ...]

    def __call__(self, pool: list[np.ndarray]) -> np.ndarray:
        return np.ndarray(self.shape, self.dtype, pool[self.of], self.offset, self.strides)


def view_of(x: np.ndarray, pool: list[np.ndarray]) -> int | View:
    """The index in a pool of x, or x as a view of one of its arrays.   Raises LookupError for another array."""
    for n, y in enumerate(pool):
        if first_byte(x) == first_byte(y) and (x.shape, x.strides, x.dtype) == (y.shape, y.strides, y.dtype):
            return n
    low, high, begin = Span.of(x)
    for n, y in enumerate(pool):
        span = Span.of(y)
        if span.first <= low and high <= span.last and y.flags.c_contiguous:
            return View(n, x.shape, x.dtype, begin - span.begin, x.strides)
    raise LookupError("NumPy computed a result of the call")
