"""Recorded kernels on other NumPy arrays: the addresses in their tables change, and all else stays.

    sequence = LaunchSequence(recorder, given, results)   raises LookupError if NumPy computed a part of the call
    results = sequence(other given arrays)                the same kernels, and views of what they fill

A kernel that sets a flag (memory.py: new_flag) is the last one: the call is computed in full.

A kernel takes an array by the address of its first element. The address lies in a given array, in an array of `empty`
(memory.py), or in a constant (recorder.py). Another address is of an array that NumPy computed. The functions of
runtime/cuda/record.py have the same names.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Hashable, Sequence
from operator import itemgetter
from types import SimpleNamespace
from typing import Any

import numpy as np

from .. import threads
from ..memory import extent, is_next_column
from ..recorder import Recorder
from .memory import ALIGNED, HELD, PAGE, address, destinations, empty, first_byte, handles, place, scratch, up, working
from .piece import JIT, Whole, entry, load_pieces, piece
from .run import Launch, add_at, now_at, start
from .views import words

BYTE = np.dtype(np.uint8)
new = tuple.__new__  # calling a NamedTuple class takes three times as long
LARGE = 1 << 18  # bytes; smaller results have new memory: that of the pool costs microseconds
NOWHERE = 1 << 62  # as an extent, of an array that is not compared
FEW, MANY = 64, 1 << 20  # parts of launches that a thread computes at first before it returns, at most
PATIENCE = 200_000  # looks at the work of others before it returns, a tenth of a millisecond or two
LAUNCHES, COUNT, ARRAYS, EXTENTS, OVERWRITTEN, PARTS, FLAGS, FLAG_COUNT, HEAD = range(9)  # words of a sequence


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
def is_flagged(sequence: Whole, handles: Whole) -> Whole:
    """Whether a kernel has set a flag."""
    s = words(sequence, HEAD)
    flags = words(s[FLAGS], s[FLAG_COUNT])
    for j in range(s[FLAG_COUNT]):
        if words(words(words(handles, flags[j] + 1)[flags[j]], 1)[0], 1)[0] != 0:
            return 1
    return 0


@piece
def check(sequence: Whole, handles: Whole, flag: Whole):
    """Write 1 to the word `flag` behind the handles where the launches must not be executed."""
    words(handles, flag + 1)[flag] = is_refused(sequence, handles)


@piece
def execute(sequence: Whole, handles: Whole, base: Whole, flag: Whole):
    """All tasks of all launches, by this thread, unless they are refused or one sets a flag; base: working memory."""
    if is_refused(sequence, handles):
        words(handles, flag + 1)[flag] = 1
        return
    s = words(sequence, HEAD)
    for n in range(s[COUNT]):
        one = words(s[LAUNCHES] + 24 * n, 3)
        start(one[0], handles, base, one[1], one[2])
        if is_flagged(sequence, handles):
            words(handles, flag + 1)[flag] = 1
            return


@piece
def share(sequence: Whole, handles: Whole, base: Whole, flag: Whole, counts: Whole, left: Whole):
    """A part of all tasks of all launches, by each of the threads that are here, in the order of the launches.

    counts: a word that becomes 1 at the end, and of each launch the tasks that were begun, and that are done. Threads
    begin a launch when all tasks of the one before are done. left: a word, the parts until it returns, as it does
    when others work on for long. The next call goes on.
    """
    if is_refused(sequence, handles):
        words(handles, flag + 1)[flag] = 1
        return
    s, own = words(sequence, HEAD), words(left, 1)
    for n in range(s[COUNT]):
        one, begun, done = words(s[LAUNCHES] + 32 * n, 4), counts + 16 * n + 8, counts + 16 * n + 16
        bounds, count, each = words(one[1], one[2] + 1), one[2], one[3]
        while now_at(begun) < count:
            first = add_at(begun, each)
            if first >= count:
                break
            last = min(first + each, count)
            start(one[0], handles, base, bounds[first], bounds[last])
            add_at(done, last - first)
            own[0] -= 1
            if own[0] <= 0:
                return
        waited = 0
        while now_at(done) < count:
            waited += 1
            if waited > PATIENCE:
                return
        if is_flagged(sequence, handles):
            words(handles, flag + 1)[flag] = 1
            return
    words(counts, 1)[0] = 1


@functools.cache
def loops() -> tuple[Any, Any, Any]:
    """The loaded `execute`, `share` and `check`."""
    each = execute, share, check
    load_pieces(each, "float32")
    return tuple(entry(x, "float32") for x in each) if JIT else each  # type: ignore[return-value]


def span_of(y: np.ndarray) -> tuple[int, int, int]:
    """(first byte, one past the last, address of the first element) of an array."""
    low, high = extent(y.shape, y.strides, y.itemsize)
    begin = first_byte(y)
    return begin + low, begin + high, begin


class LaunchSequence:
    """The kernels of a call on other arrays of the same layout; `empty` made all arrays that are not given."""

    def __init__(self, recorder: Recorder, given: Sequence[np.ndarray], results: Any, overwritten: Any = None,
                 held: Any = (), backward: bool = False):  # fmt: skip
        """results, held: nested tuples of arrays, for the caller in memory of their own, and for a backward.

        overwritten: a state, among the given arrays, that the kernels write to. backward: whether it is a pullback.
        Raises LookupError unless the kernels are all that the call computed.
        """
        if recorder.obstacle:
            raise LookupError(recorder.obstacle)
        if not recorder.launches:
            raise LookupError("no compiled kernel computed the call")
        public, written = arrays_of(results), parts_of(given, overwritten)
        if any(np.may_share_memory(x, y) for n, y in enumerate(given) if n not in written for x in public):
            raise LookupError("a result lies in an array that is given")
        own = owners((public, held, recorder.flags), recorder)
        known = {id(y) for y in own}
        between = [y for y in recorder.allocated if id(y) not in known]
        first, pool = len(given) + len(own), [*given, *own, *between]
        constants = [*{id(y): y for y in recorder.constants}.values()]
        if len({first_byte(y) for y in pool if y.size}) < sum(y.size > 0 for y in pool):
            raise LookupError("two arrays begin at one place")
        spans = [span_of(y) for y in (*pool, *constants)]
        each = [[(slot, *_source(int(launch.table[slot]), spans, len(pool))) for slot in launch.slots]
                for launch in recorder.launches]  # fmt: skip
        used = {n for found in each for _, n, _ in found}
        places, self._buffer = placed(between, [{n - first for _, n, _ in found} for found in each])
        self._launches: list[Launch] = []
        for launch, found in zip(recorder.launches, each, strict=True):
            moved = [(slot, n, at) if n < first else (slot, first, at + places[n - first])
                     for slot, n, at in found if n < len(pool)]  # fmt: skip
            self._launches.append(launch.on(moved))
        if not used.issuperset(n for n in range(len(given), len(pool)) if pool[n].size):
            raise LookupError("an array was allocated for something else than a kernel")
        self.read = {n for n in used if n < len(given)}  # indices of the given arrays that the kernels take
        self.get, self.held = finder(results, pool[:first]), finder(held, pool[:first], constants)
        self.allocations = [(y.shape, y.dtype) for y in own]
        self._flags = [n for n, y in enumerate(pool) if any(y is one for one in recorder.flags)]
        self._makers, self._block = self._makers_of(own, {id(y) for y in owners(public, recorder)}, len(given))
        extents = [[*extent(y.shape, y.strides, y.itemsize), y.itemsize] for y in given]
        if len(written) > 1 and is_next_column(given[written[0]], given[written[1]]):
            extents[written.pop(1)][:2] = NOWHERE, NOWHERE  # z is the column behind S, of one array
        self._prepare(np.array(extents, np.int64), np.array(written, np.int64), constants)

    def _makers_of(self, own: list[np.ndarray], public: set[int], first: int) -> tuple[list[Any], int]:
        """((maker, shape, dtype, place) of each array, bytes of a block): large ones for a backward alone lie in it."""
        makers, size = [], 0
        for n, y in enumerate(own, first):
            make, at = np.zeros if n in self._flags else np.empty, -1
            if y.nbytes >= LARGE and n not in self._flags:
                make = empty
                if id(y) not in public:
                    at, size = size, up(size + y.nbytes, PAGE)
            makers.append((make, y.shape, y.dtype, at))
        return makers, size

    def _prepare(self, extents: np.ndarray, parts: np.ndarray, constants: Sequence[np.ndarray]) -> None:
        """The steps of a call: (words that a compiled loop reads, bytes, launches that threads share), or a launch."""
        flags = np.array(self._flags, np.int64)
        self._alive = [extents, parts, flags, *constants]

        def table_of(launches: np.ndarray) -> int:
            table = np.array([address(launches), len(launches), len(extents), address(extents),
                              address(parts), len(parts), address(flags), len(flags)], np.int64)  # fmt: skip
            self._alive += [launches, table]
            return address(table)

        self._steps: list[Any] = []
        for is_brief, each in itertools.groupby(self._launches, lambda one: one.is_brief):
            found = list(each)
            are_alone = all(one.is_one_task for one in found)
            if not is_brief or (len(found) == 1 and not are_alone):
                self._steps += found
                continue
            size, shared = max(one.bytes for one in found), 0
            if are_alone:
                rows = [[one.at, one.bounds[0], one.bounds[-1]] for one in found]
            else:
                bounds, shared = [np.array(one.bounds, np.int64) for one in found], len(found)
                self._alive += bounds
                rows = [[one.at, address(y), len(y) - 1, one.part] for one, y in zip(found, bounds, strict=True)]
            self._steps.append((table_of(np.array(rows, np.int64)), size, shared))
        self._execute, self._share, self._check = loops()
        self._checked = table_of(np.empty((0, 0), np.int64)) if type(self._steps[0]) is Launch else 0
        self.nbytes = sum(y.nbytes for y in self._alive)  # of the host
        self.nbytes += sum(one.nbytes for one in self._launches)

    def __call__(self, given: list[np.ndarray], state: Any = None, pointers: None = None) -> Any:
        """The results; None if the call must be computed in full."""
        pool = self.run(given)
        return None if pool is None else self.get(pool)

    def run(self, given: list[np.ndarray], pointers: None = None) -> list[np.ndarray] | None:
        """The given arrays and those of `allocations`, filled; None if the call must be computed in full."""
        is_plain, block = destinations.arrays is None, working((self._block,), BYTE) if self._block else None
        arrays = [*given]
        for make, *how, at in self._makers:
            if at >= 0:
                arrays.append(np.ndarray(*how, block, at))
            else:
                arrays.append((make if is_plain or make is np.zeros else empty)(*how))
        if self._buffer:
            size = self._buffer
            arrays.append(np.empty(size, BYTE) if size < LARGE else working((size,), BYTE))
        row, count = handles(arrays), len(arrays)
        at = place(row)
        if self._checked:
            self._check(self._checked, at, count)
            if row[count]:
                return None
        for step in self._steps:
            if type(step) is Launch:
                step.execute(at)
                if any(arrays[n][0] for n in self._flags):
                    return None
            else:
                table, size, shared = step
                if shared:
                    self._by_threads(table, at, size, row, count, shared)
                else:
                    _held, base = scratch(size)
                    self._execute(table, at, base, count)
                if row[count]:
                    return None
        return arrays

    def _by_threads(self, table: int, handles: int, size: int, row: Any, flag: int, launches: int) -> None:
        """`share` by all threads, which stay from the first launch to the last: waking them costs as much as one."""
        counts = np.zeros(1 + 2 * launches, np.int64)
        begin = address(counts)

        def work(first: int, last: int) -> None:
            _held, base = scratch(size)
            left, most, wait = np.zeros(1, np.int64), FEW, 0.0
            at = address(left)
            while not (counts[0] or row[flag] or threads.cancelled()):
                left[0], began = most, time.perf_counter()
                self._share(table, handles, base, flag, begin, at)
                if (parts := most - int(left[0])) > 0:
                    seconds = max(time.perf_counter() - began, 1e-9)
                    most, wait = max(1, min(int(parts * threads.LONG / seconds), MANY)), 0.0
                else:
                    time.sleep(wait)
                    wait = min(2 * wait + 1e-5, 1e-3)

        count = threads.num_threads()
        threads.run(work, count, count)


def placed(arrays: Sequence[np.ndarray], launches: Sequence[set[int]]) -> tuple[list[int], int]:
    """(places of arrays in one buffer, its bytes): an array lies where others were that no launch takes any more.

    launches: the indices of the arrays that each of them takes; others among them are ignored.
    """
    last = {n: i for i, taken in enumerate(launches) for n in taken}
    places, size, alive = [0] * len(arrays), 0, list[tuple[int, int, int]]()  # (place, end, index), in order
    seen = set[int]()
    for i, taken in enumerate(launches):
        for n in sorted(n for n in taken - seen if 0 <= n < len(arrays)):
            step = PAGE if arrays[n].nbytes >= HELD else ALIGNED
            at, bytes_of = 0, up(max(arrays[n].nbytes, 1), ALIGNED)
            for begin, end, _ in alive:
                if at + bytes_of <= begin:
                    break
                at = up(end, step)
            places[n], size = at, max(size, at + bytes_of)
            alive = sorted([*alive, (at, at + bytes_of, n)])
        seen |= taken
        alive = [each for each in alive if last[each[2]] > i]
    return places, size


def _source(at: int, spans: Sequence[tuple[int, int, int]], count: int) -> tuple[int, int]:
    """(index, offset) of the array that an address lies in; those from index `count` on are constants.

    Raises LookupError if it lies in none, or in several.
    """
    found = [n for n, (_, _, begin) in enumerate(spans) if begin == at]
    found = found or [n for n, (first, last, _) in enumerate(spans) if first <= at < last]
    if not found or (len(found) > 1 and found[0] < count):
        raise LookupError("NumPy computed an array of the call" if not found else "two arrays overlap")
    return found[0], at - spans[found[0]][2]


# results, and arrays in nested tuples


def arrays_of(x: Any) -> list[np.ndarray]:
    """The arrays among nested tuples, lists and dicts."""
    if isinstance(x, np.ndarray):
        return [x]
    x = tuple(x.values()) if isinstance(x, dict) else x
    return [y for part in x for y in arrays_of(part)] if isinstance(x, tuple | list) else []


def owners(x: Any, recorder: Recorder) -> list[np.ndarray]:
    """The allocated arrays in whose memory the arrays of x lie."""
    arrays = arrays_of(x)
    return [y for y in recorder.allocated if any(np.may_share_memory(x, y) for x in arrays)]


def parts_of(given: Sequence[np.ndarray], state: Any) -> list[int]:
    """The indices of given arrays that are the parts of a state."""
    parts = state if isinstance(state, tuple | list) else (state,)
    return [n for n, x in enumerate(given) if any(x is S for S in parts)]


def finder(x: Any, pool: list[np.ndarray], constants: Sequence[np.ndarray] = ()) -> Callable[[list[np.ndarray]], Any]:
    """The function of another pool that returns what x, nested tuples of arrays, is there.

    What is no array is the same in every call. Raises LookupError for an array that NumPy computed.
    """
    if isinstance(x, np.ndarray):
        return (lambda pool: x) if any(np.may_share_memory(x, y) for y in constants) else view_of(x, pool)
    if isinstance(x, dict | list | SimpleNamespace):
        raise LookupError(f"the core keeps a {type(x).__name__} for its backward")
    if not isinstance(x, tuple) or not arrays_of(x):
        return lambda pool: x
    kind, parts = type(x), [finder(part, pool, constants) for part in x]
    return lambda pool: new(kind, [part(pool) for part in parts])


def view_of(x: np.ndarray, pool: list[np.ndarray]) -> Callable[[list[np.ndarray]], np.ndarray]:
    """Of one array: one of the pool, or a view of one; of an empty array, whose place says nothing, a new one."""
    if not x.size:
        return lambda pool: np.empty(x.shape, x.dtype)
    for n, y in enumerate(pool):
        if first_byte(x) == first_byte(y) and (x.shape, x.strides, x.dtype) == (y.shape, y.strides, y.dtype):
            return itemgetter(n)
    low, high, begin = span_of(x)
    for n, y in enumerate(pool):
        first, last, start = span_of(y)
        if first <= low and high <= last and y.flags.c_contiguous:
            how = x.shape, x.dtype, begin - start, x.strides
            return lambda pool, n=n: np.ndarray(*how[:2], pool[n], *how[2:])  # type: ignore[misc]
    raise LookupError("NumPy computed a result of the call")


def layout_of(arrays: Sequence[np.ndarray]) -> tuple[Hashable, None]:
    """(how arrays lie: recorded kernels take others that lie so, their pointers: None on NumPy)."""
    return tuple((y.shape, y.strides, y.dtype) for y in arrays), None
