"""Recorded launches (runtime/recorder.py) on other CuPy arrays of the same layout.

with Recorder() as recorder:
    ...                                            launches through launch.py, `empty` of the namespace
sequence = LaunchSequence(recorder, given)         raises LookupError if the call did anything else on the device
allocated = sequence.run(pointers)
"""

from __future__ import annotations

import functools
import threading
from array import array
from collections.abc import Collection, Sequence
from math import prod
from typing import Any, NamedTuple

from ..recorder import Recorder, allocated
from . import constants, launch

Array = Any
Shape = tuple[int, ...]
new = tuple.__new__  # calling a NamedTuple class takes three times as long
ALIGNED = 512  # bytes, as CuPy aligns its allocations
FEW_BYTES = 1 << 14  # scratch up to this size, a few pages, may share the allocation of held arrays
MIN_POOL_RATIO = 8  # scratch shares an allocation only if the other arrays are at least so many times its size


def empty(shape: Shape, dtype: Any) -> Array:
    """A new array on the current device, reported to the recorder that is entered, if any."""
    return allocated(launch.array_type()(shape, dtype), is_counted=True)


class RecordedNamespace:
    """An array namespace whose `empty` reports each allocation to the recorder that is entered, if any."""

    def __init__(self, xp: Any):
        self._xp = xp

    def __getattr__(self, name: str) -> Any:
        return getattr(self._xp, name)

    def empty(self, shape: Shape, **options: Any) -> Array:
        """A new array."""
        return allocated(self._xp.empty(shape, **options))


class Place(NamedTuple):
    """The place of an allocated array: an allocation of its own, or an offset in a shared one."""

    shape: Shape | None  # None: only its memory is used
    dtype: Any
    which: int | None  # of the shared allocations
    offset: int


class LaunchSequence:
    """The launches of a call on other arrays of the same layout, with new arrays in the place of the allocated ones.

    They must be all that the call did on the device: `empty` allocated all arrays that are not given. The driver
    copies arguments at the launch, so one buffer for each launch serves all calls, one at a time.
    """

    def __init__(self, recorder: Recorder, given: Sequence[Array]):
        """Raises LookupError unless every pointer of every launch points to one array, given, allocated or constant.

        And for an allocated array that no launch takes: array calls filled it, and those are not recorded.
        """
        if recorder.obstacle:
            raise LookupError(recorder.obstacle)
        taken = {y.data.ptr for one in recorder.launches for y in one.arrays or () if y is not None}
        if any(x.data.ptr not in taken for x in recorder.allocated):
            raise LookupError("an array was allocated for something else than a launch")
        pool = [*given, *recorder.allocated]
        owners = {x.data.ptr: n for n, x in enumerate(pool)}
        if len(owners) < len(pool):
            raise LookupError("two arrays begin at one place")
        self._empty, self._allocate = launch.array_type(), launch.allocator()
        self.allocations = [(tuple(x.shape), x.dtype) for x in recorder.allocated]
        self._sizes: list[int] = []  # bytes of the memory that several arrays share
        self._places = [Place(*one, None, 0) for one in self.allocations]
        self._launchers = [Launcher(record, owners, pool) for record in recorder.launches]
        self._launches = [(one.words, one.places, one.inside, one.launch, one.address) for one in self._launchers]
        self._stream, self._lock = launch.cupy().cuda.get_current_stream, threading.Lock()

    def run(self, pointers: list[int]) -> list[Any]:
        """pointers: of the given arrays; the pointers of the allocated arrays are appended. Returns the allocated
        arrays, in order; for scratch, the memory that holds it.
        """
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
                    places[n] = Place(shape, dtype, None, 0)
                    continue
                places[n] = Place(shape if n in public else None, dtype, len(self._sizes), size)
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
            for words, places, inside, fire, address in self._launches:
                for at, n in places:
                    words[at] = pointers[n]
                for at, n, offset in inside:
                    words[at] = pointers[n] + offset
                fire(stream, address, 0)


class Launcher:
    """One kernel on the device that was current: `launch(stream, address, 0)` launches it with the arguments `words`.

    places: (position in words, index of the array whose pointer is there). inside: the same of parts of arrays, with
    their offset.
    """

    def __init__(self, record: launch.LaunchRecord, owners: dict[int, int], pool: Sequence[Array]):
        """owners: indices in the pool by pointer."""
        if record.arrays is None:
            raise LookupError("a launch did not say which arrays it takes")
        cuda, size = launch.cupy().cuda, -(-len(record.arguments) // 8)
        self.words = array("Q", record.arguments.ljust(8 * size, b"\0"))
        pointers = {y.data.ptr for y in record.arrays if y is not None}
        self._constants = [x for x in map(constants.at, pointers - owners.keys()) if x is not None]  # stay alive
        pointers -= {x.data.ptr for x in self._constants}
        parts = {word: _whole(word, pool) for word in pointers - owners.keys()}
        self.places = [(at, owners[word]) for at, word in enumerate(self.words) if word in pointers & owners.keys()]
        self.inside = [(at, *parts[word]) for at, word in enumerate(self.words) if word in parts]
        if len({self.words[at] for at, *_ in (*self.places, *self.inside)}) < len(pointers):
            raise LookupError("a pointer is not among the arguments")
        self._kernel = launch.kernel(record.file, record.entry, record.constants, record.shared)  # stays loaded
        self._parameters = array("Q", [self.words.buffer_info()[0]])
        self.address = self._parameters.buffer_info()[0]
        shape = (self._kernel.kernel.ptr, record.blocks, 1, 1, record.threads, 1, 1, record.shared)
        self.launch = functools.partial(cuda.driver.launchKernel, *shape)


def _whole(pointer: int, pool: Sequence[Array]) -> tuple[int, int]:
    """(index, offset) of the dense array that a pointer lies in.   Raises LookupError if it lies in none."""
    for n, x in enumerate(pool):
        if x.data.ptr < pointer < x.data.ptr + x.nbytes and x.flags.c_contiguous:
            return n, pointer - x.data.ptr
    raise LookupError(f"a pointer of no array: {pointer}")


class View(NamedTuple):
    """An array that the caller gets: which of the pool, in which shape, whether with time and heads exchanged."""

    of: int
    shape: Shape
    transposed: bool

    def __call__(self, pool: Sequence[Array]) -> Array:
        x = pool[self.of]
        if x.shape != self.shape:
            x = x.reshape(self.shape)
        return x.swapaxes(-3, -2) if self.transposed else x


def view_of(x: Any, pool: Sequence[Array]) -> Any:
    """How x, one array, a named tuple of arrays or None, is got from the dense arrays of a pool.

    Raises LookupError where it is not one of them.
    """
    if x is None:
        return None
    if isinstance(x, tuple):
        return type(x), tuple(view_of(y, pool) for y in x)
    transposed = not x.flags.c_contiguous
    base = x.swapaxes(-3, -2) if transposed and x.ndim > 2 else x
    for n, y in enumerate(pool):
        same = (base.data.ptr, base.dtype, prod(base.shape)) == (y.data.ptr, y.dtype, prod(y.shape))
        if same and base.flags.c_contiguous and y.flags.c_contiguous:
            return View(n, tuple(base.shape), transposed)
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
