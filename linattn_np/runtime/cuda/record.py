"""Recorded launches (runtime/recorder.py) on other CuPy arrays of the same layout.

    sequence = LaunchSequence(recorder, given, results)   raises LookupError if it did anything else on the device
    results = sequence(other given arrays, state, their pointers)

A result is a view of an array that the launches make, in the shape that the caller gets. The functions of
runtime/pieces/record.py have the same names.
"""

from __future__ import annotations

import functools
import threading
from array import array
from collections.abc import Collection, Hashable, Sequence
from math import prod
from typing import Any, NamedTuple

from ..memory import is_on_device
from ..pieces.memory import next_destination
from ..recorder import Recorder, allocated
from . import constants, launch

Array = Any
Shape = tuple[int, ...]
new = tuple.__new__  # calling a NamedTuple class takes three times as long
ALIGNED = 512  # bytes, as CuPy aligns its allocations
FEW_BYTES = 1 << 14  # scratch up to this size, a few pages, may share the allocation of held arrays
MOST_DISJOINT = 64  # sets of pointers of calls whose state shares no memory with the inputs
MIN_POOL_RATIO = 8  # scratch shares an allocation only if the other arrays are at least so many times its size


def empty(shape: Shape, dtype: Any, is_counted: bool = True) -> Array:
    """An array for a kernel to fill: the caller's `out` (nn/destination.py), or a new one on the current device.

    A new one is reported to the recorder that is entered, if any. is_counted: the call would free it if it were not
    recorded.
    """
    if (found := next_destination(shape, dtype)) is not None:
        return found
    return allocated(launch.array_type()(shape, dtype), is_counted)


# of an allocated array: shape (None: only its memory is used), dtype, a shared allocation (None: its own), offset
Place = tuple[Shape | None, Any, int | None, int]


class LaunchSequence:
    """The launches of a call on other arrays of the same layout, with new arrays in the place of the allocated ones.

    They must be all that the call did on the device: `empty` allocated all arrays that are not given. The driver
    copies arguments at the launch, so one buffer for each launch serves all calls, one at a time.
    """

    def __init__(self, recorder: Recorder, given: Sequence[Array], results: Any = (), overwritten: Any = None,
                 held: Sequence[Array] = (), backward: bool = False):  # fmt: skip
        """results: nested tuples of arrays. overwritten: a state, among the given arrays, that launches write to.

        held: allocated arrays whose memory is read later. backward: of a pullback, whose results may be given arrays.
        Raises LookupError unless every pointer of every launch points to one array, given, allocated or constant, for
        an allocated array that no launch takes, which array calls filled, and for a result that is not recorded.
        """
        if recorder.obstacle:
            raise LookupError(recorder.obstacle)
        taken = {y.data.ptr for one in recorder.launches for y in one.arrays or () if y is not None}
        if any(x.size and x.data.ptr not in taken for x in recorder.allocated):  # nothing fills an empty one
            raise LookupError("an array was allocated for something else than a launch")
        pool = [*given, *recorder.allocated]
        owners = {x.data.ptr: n for n, x in enumerate(pool) if x.size}
        if len(owners) < sum(x.size > 0 for x in pool):
            raise LookupError("two arrays begin at one place")
        self._empty, self._allocate = launch.array_type(), launch.allocator()
        self.allocations = [(tuple(x.shape), x.dtype) for x in recorder.allocated]
        self._sizes: list[int] = []  # bytes of the memory that several arrays share
        self._places: list[Place] = [(*one, None, 0) for one in self.allocations]
        self._launches = [_moved(one, owners, pool) for one in recorder.launches]
        self._stream, self._lock = launch.cupy().cuda.get_current_stream, threading.Lock()
        self.count, self._given_back = len(given), set[int]()  # held arrays that are gradients
        self.places_held = [owners[y.data.ptr] for y in held]
        state = overwritten if isinstance(overwritten, tuple) else (overwritten,)
        self.overwritten = [n for n, x in enumerate(given) if any(x is S for S in state)]
        self._spans = [_span(x) for x in given]
        self._disjoint: set[tuple[int, ...]] = set()  # pointers of calls whose state shares no memory with the inputs
        self.kind: type | None = type(results) if isinstance(results, tuple) else None  # None: one array
        each = results if isinstance(results, tuple) else (results,)
        self.results = tuple(positions(x, pool) for x in each)  # how `get` finds each
        own = {n for x in self.results for n in places(x) if n < self.count} <= {*self.overwritten}
        if not own and not backward:
            raise LookupError("a result lies in an array that is given")
        if self.results:
            self.lay(few=backward)

    def __call__(self, given: list[Array], state: Any, pointers: list[int]) -> Any:
        """The results; None if the call must be computed in full."""
        pool = self.run(given, pointers)
        return None if pool is None else self.get(pool)

    def get(self, pool: Sequence[Array]) -> Any:
        """The results among the arrays of `run`."""
        if self.kind is None:
            (n,) = self.results
            return pool[n] if type(n) is int else get(n, pool)
        return new(self.kind, [pool[n] if type(n) is int else get(n, pool) for n in self.results])

    def held(self, pool: Sequence[Array]) -> list[Array]:
        """The arrays that are read later, or their memory, among those of `run`."""
        return [pool[n] for n in self.places_held]

    def run(self, given: list[Array], pointers: list[int]) -> list[Any] | None:
        """The given arrays, and new ones in the place of the allocated ones; for scratch, the memory that holds it.

        pointers: of the given arrays; those of the allocated arrays are appended. None: computed in full.
        """
        if self.overwritten and (key := tuple(pointers)) not in self._disjoint:
            if self.overlaps(pointers):
                return None  # checking the arguments raises the error
            if len(self._disjoint) < MOST_DISJOINT:
                self._disjoint.add(key)
        return given + self.make(pointers)

    def overlaps(self, pointers: list[int]) -> bool:
        """Whether a state that is overwritten may share memory with another array."""
        for at in self.overwritten:
            low, high = self._spans[at]
            begin, end = pointers[at] + low, pointers[at] + high
            for n, (pointer, (low, high)) in enumerate(zip(pointers, self._spans, strict=True)):
                if pointer + low < end and begin < pointer + high and n != at:
                    return True
        return False

    def make(self, pointers: list[int]) -> list[Any]:
        """Arrays in the place of the allocated ones, filled; pointers: as of `run`."""
        arrays: list[Any] = []
        empty, shared = self._empty, [*map(self._allocate, self._sizes)]
        begin = [memory.ptr for memory in shared]
        for shape, dtype, which, offset in self._places:
            if which is None:
                x = empty(shape, dtype)
                pointers.append(x.data.ptr)
            else:
                x = shared[which]
                pointers.append(begin[which] + offset)
                if shape is not None:
                    x = empty(shape, dtype, x + offset if offset else x)
            arrays.append(x)
        self.launch(pointers, self._stream().ptr)
        return arrays

    def lay(self, few: bool = False) -> None:
        """Results become arrays of their shapes, each in one piece of memory; few: small ones share a piece."""
        known = set[int]()
        self.results = tuple(_as_array(x, self, known) for x in self.results)
        for n in self._given_back:
            _as_array(n, self, known)
        together = [{n - self.count for n in places(x) if n >= self.count} for x in (*self.results, *self._given_back)]
        if few:
            small = {n for one in together for n in one if self.bytes_of(n) <= FEW_BYTES}
            together = [small, *(one - small for one in together)]
        self.keep(together, {n - self.count for n in self.places_held})

    def give(self, n: int) -> None:
        """The n-th held array is a gradient too: it becomes an array."""
        self._given_back.add(self.places_held[n])
        self.lay()

    def results_among(self, indices: Collection[int]) -> set[int]:
        """Those indices of the pool that results refer to."""
        return {n for x in self.results for n in places(x) if n in indices}

    def keep(self, together: Sequence[Collection[int]], held: Collection[int] = ()) -> None:
        """Which allocated arrays are used after `run`: the arrays of a set share one allocation.

        held: arrays whose memory alone is used. Scratch, which only these launches read, shares the allocation of held
        or other arrays that are much larger; else it has an allocation of its own, which is free after the launches.
        """
        groups, known = [list[int]() for _ in together], set[int]()
        for own, one in zip(groups, together, strict=True):
            own += sorted(set(one) - known)
            known.update(one)
        rest = [n for n in range(len(self.allocations)) if n not in known]
        sizes = [sum(map(self.bytes_of, one)) for one in groups]
        groups.append([n for n in rest if n in held])
        held_size, scratch = sum(map(self.bytes_of, groups[-1])), [n for n in rest if n not in held]
        size = sum(map(self.bytes_of, scratch))
        at = max(range(len(sizes)), key=sizes.__getitem__, default=0)
        if groups[-1] and size <= max(FEW_BYTES, held_size // MIN_POOL_RATIO):
            at = len(sizes)
        elif not sizes or size * MIN_POOL_RATIO > sizes[at]:
            at = len(groups)
            groups.append([])
        groups[at] += scratch
        self._lay(groups, known)

    def _lay(self, groups: list[list[int]], public: Collection[int]) -> None:
        """The places of all allocated arrays, a group in one allocation; public: the numbers of those that become
        arrays."""
        self._sizes, places = [], dict[int, Place]()
        for group in groups:
            size = 0
            for n in group:
                shape, dtype = self.allocations[n]
                if len(group) == 1 and n in public:
                    places[n] = shape, dtype, None, 0
                    continue
                places[n] = shape if n in public else None, dtype, len(self._sizes), size
                size += self.bytes_of(n)
            if size:
                self._sizes.append(size)
        self._places = [places[n] for n in range(len(self.allocations))]

    def bytes_of(self, n: int) -> int:
        """Of an allocated array, with those up to the next."""
        shape, dtype = self.allocations[n]
        return max(-(-prod(shape) * dtype.itemsize // ALIGNED), 1) * ALIGNED

    def launch(self, pointers: list[int], stream: int) -> None:
        """The launches alone, on a stream; pointers: of the arrays given and of those in the place of `allocations`."""
        if not launch.active.is_bound:
            launch.bind()
        with self._lock:
            for words, places, inside, fire, address, _ in self._launches:
                for at, n in places:
                    words[at] = pointers[n]
                for at, n, offset in inside:
                    words[at] = pointers[n] + offset
                fire(stream, address, 0)


def _moved(one: launch.Launch, owners: dict[int, int], pool: Sequence[Array]) -> tuple[Any, ...]:
    """(words, places, inside, launch, address, what stays alive) of a recorded launch, on the current device.

    launch(stream, address, 0) launches the kernel with the arguments `words`. places: (position in words, index of the
    array whose pointer is there). inside: the same of parts of arrays, with their offset. owners: indices by pointer.
    """
    if one.arrays is None:
        raise LookupError("a launch did not say which arrays it takes")
    words = array("Q", one.arguments.ljust(-(-len(one.arguments) // 8) * 8, b"\0"))
    pointers = {y.data.ptr for y in one.arrays if y is not None and y.size}
    fixed = [x for x in map(constants.at, pointers - owners.keys()) if x is not None]
    pointers -= {x.data.ptr for x in fixed}
    parts = {word: _whole(word, pool) for word in pointers - owners.keys()}
    places = [(at, owners[word]) for at, word in enumerate(words) if word in pointers & owners.keys()]
    inside = [(at, *parts[word]) for at, word in enumerate(words) if word in parts]
    if len({words[at] for at, *_ in (*places, *inside)}) < len(pointers):
        raise LookupError("a pointer is not among the arguments")
    file, entry, threads, build, shared, _ = one.kernel
    loaded = launch.kernel(file, entry, build, shared)
    parameters = array("Q", [words.buffer_info()[0]])
    shape = (loaded.kernel.ptr, one.blocks, 1, 1, threads, 1, 1, shared)
    fire = functools.partial(launch.cupy().cuda.driver.launchKernel, *shape)
    return words, places, inside, fire, parameters.buffer_info()[0], (fixed, loaded, parameters)


def _whole(pointer: int, pool: Sequence[Array]) -> tuple[int, int]:
    """(index, offset) of the dense array that a pointer lies in.   Raises LookupError if it lies in none."""
    for n, x in enumerate(pool):
        if x.data.ptr < pointer < x.data.ptr + x.nbytes and x.flags.c_contiguous:
            return n, pointer - x.data.ptr
    raise LookupError(f"a pointer of no array: {pointer}")


class View(NamedTuple):
    """An array that the caller gets: which of the pool, in which shape, with this axis and the next exchanged."""

    of: int
    shape: Shape
    axis: int  # 0: none; time and heads are -3 and -2 of rows, -2 and -1 of numbers

    def __call__(self, pool: Sequence[Array]) -> Array:
        x = pool[self.of]
        if x.shape != self.shape:
            x = x.reshape(self.shape)
        return x.swapaxes(self.axis, self.axis + 1) if self.axis else x


def view_of(x: Any, pool: Sequence[Array]) -> Any:
    """How x, one array, a named tuple of arrays or None, is got from the dense arrays of a pool.

    Raises LookupError where it is not one of them.
    """
    if x is None:
        return None
    if isinstance(x, tuple):
        return type(x), tuple(view_of(y, pool) for y in x)
    axis, base = 0, x
    for axis in (0, *(n for n in (-3, -2) if x.ndim >= -n)):
        base = x.swapaxes(axis, axis + 1) if axis else x
        if base.flags.c_contiguous:
            break
    for n, y in enumerate(pool):
        same = (base.data.ptr, base.dtype, prod(base.shape)) == (y.data.ptr, y.dtype, prod(y.shape))
        if same and base.flags.c_contiguous and y.flags.c_contiguous:
            return View(n, tuple(base.shape), axis)
    raise LookupError


def get(view: Any, pool: Sequence[Array]) -> Any:
    """What `view_of` described, or the array of a number, from another pool."""
    if type(view) is int:
        return pool[view]
    if view is None:
        return None
    if type(view) is View:
        return view(pool)
    kind, parts = view
    return new(kind, [pool[n] if type(n) is int else get(n, pool) for n in parts])


def positions(x: Any, pool: list[Array]) -> Any:
    """How `get` finds x, None or an array or a named tuple of arrays, in a pool: by index if it is one of them.

    Raises LookupError if it is not a view of one.
    """
    if (at := next((n for n, y in enumerate(pool) if x is y), None)) is not None:
        return at
    if isinstance(x, tuple):
        return type(x), tuple(positions(part, pool) for part in x)
    view = view_of(x, pool)
    same = view is not None and not view.axis and view.shape == tuple(pool[view.of].shape)
    return view.of if same else view


def _as_array(position: Any, sequence: LaunchSequence, known: set[int]) -> Any:
    """A position, of arrays that the sequence makes in the shape that the caller gets.

    known: indices of arrays that other results refer to; updated.
    """
    if isinstance(position, View):
        n, first = position.of, sequence.count
        if n >= first and n not in known and not position.axis:
            sequence.allocations[n - first] = position.shape, sequence.allocations[n - first][1]
            position = n
        known.add(n)
    elif isinstance(position, tuple):
        position = position[0], tuple(_as_array(part, sequence, known) for part in position[1])
    elif position is not None:
        known.add(position)
    return position


def places(position: Any) -> set[int]:
    """The indices of the pool that a position, or a named tuple of positions, refers to."""
    if position is None or type(position) is int:
        return set() if position is None else {position}
    return {position.of} if type(position) is View else {n for part in position[1] for n in places(part)}


def _span(x: Array) -> tuple[int, int]:
    """Offsets from the address of an array to its first byte and to the end of its last."""
    spans = [stride * (n - 1) for stride, n in zip(x.strides, x.shape, strict=True)]
    return sum(s for s in spans if s < 0), sum(s for s in spans if s > 0) + x.itemsize


def owners(x: Any, recorder: Recorder) -> list[Array]:
    """The allocated arrays that the arrays among nested tuples, lists and dicts of x begin in."""
    found = {y.data.ptr for y in arrays_of(x)}
    return [y for y in recorder.allocated if any(y.data.ptr <= at < y.data.ptr + max(y.nbytes, 1) for at in found)]


def arrays_of(x: Any) -> list[Array]:
    """The arrays on the device among nested tuples, lists and dicts."""
    x = tuple(x.values()) if isinstance(x, dict) else x
    if isinstance(x, tuple | list):
        return [y for part in x for y in arrays_of(part)]
    return [x] if is_on_device(x) else []


def layout_of(arrays: Sequence[Array]) -> tuple[Hashable, list[int]]:
    """(how arrays lie: recorded launches take others that lie so, their pointers)."""
    key: list[Any] = [launch.device_function()()]
    pointers = list[int]()
    for x in arrays:
        data = x.data
        pointer = data.ptr
        key += x.shape, x._c_contiguous or x.strides, x.dtype, pointer & 15, data.device_id
        pointers.append(pointer)
    return tuple(key), pointers
