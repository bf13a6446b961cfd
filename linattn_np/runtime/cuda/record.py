"""What a call launches and allocates, recorded while it runs and replayed on other arrays of the same layout.

    with Recorder() as recorder:
        ...                                            launches through launch.py, `empty` of namespace(xp)
    sequence = LaunchSequence(recorder, given)         raises LookupError if the call did anything else on the device
    allocated = sequence.run(pointers)
"""

from __future__ import annotations

import functools
import threading
from array import array
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

from . import constants, launch

Array = Any
Shape = tuple[int, ...]
ALIGNED = 512  # bytes, as CuPy aligns its allocations


class Recorder:
    """The launches of this thread and the arrays allocated for them, while it is entered."""

    def __init__(self) -> None:
        self.launches: list[launch.LaunchRecord] = []
        self.allocated: list[Array] = []

    def __enter__(self) -> Recorder:
        self._before = launch.active.recorder
        launch.active.recorder = self
        return self

    def __exit__(self, *error: object) -> None:
        launch.active.recorder = self._before


class RecordedNamespace:
    """An array namespace whose `empty` tells the recorder that is entered, if any, what it made."""

    def __init__(self, xp: Any):
        self._xp = xp

    def __getattr__(self, name: str) -> Any:
        return getattr(self._xp, name)

    def empty(self, shape: Shape, **options: Any) -> Array:
        """A new array."""
        made = self._xp.empty(shape, **options)
        if launch.active.recorder is not None:
            launch.active.recorder.allocated.append(made)
        return made


@functools.cache
def namespace(xp: Any) -> RecordedNamespace:
    """CuPy's namespace, with allocations that are recorded."""
    return RecordedNamespace(xp)


class LaunchSequence:
    """The launches of a call on other arrays of the same layout, with new arrays in the place of the allocated ones.

    They must be all that the call did on the device: nothing but `empty` made the arrays that are not given. The driver
    copies arguments at the launch, so one buffer for each launch serves all calls, one at a time.
    """

    def __init__(self, recorder: Recorder, given: Sequence[Array]):
        """Raises LookupError unless every pointer of every launch is that of one array given, allocated or constant.

        And for an allocated array that no launch takes: array calls filled it, and those are not recorded.
        """
        taken = {y.data.ptr for one in recorder.launches for y in one.arrays or () if y is not None}
        if any(x.data.ptr not in taken for x in recorder.allocated):
            raise LookupError("an array was allocated for something else than a launch")
        owners = {x.data.ptr: n for n, x in enumerate([*given, *recorder.allocated])}
        if len(owners) < len(given) + len(recorder.allocated):
            raise LookupError("two arrays begin at one place")
        self._empty, self.allocations = launch.array_type(), [(tuple(x.shape), x.dtype) for x in recorder.allocated]
        self._steps: list[tuple[Any, Any]] = list(self.allocations)  # (shape, dtype), or (None, offset in the scratch)
        self._scratch, self._allocate = 0, launch.allocator()  # bytes
        self._launchers = [Launcher(record, owners) for record in recorder.launches]
        self._launches = [(one.words, one.places, one.launch, one.address) for one in self._launchers]
        self._stream, self._lock = launch.cupy().cuda.get_current_stream, threading.Lock()

    def run(self, pointers: list[int]) -> list[Array]:
        """pointers: of the arrays given; those of the allocated arrays are appended. The allocated arrays, in order.

        None in the place of those that were not kept.
        """
        made: list[Array] = []
        empty, base = self._empty, 0
        if self._scratch:
            scratch = self._allocate(self._scratch)
            base = scratch.ptr
        for shape, place in self._steps:
            if shape is None:
                made.append(None)
                pointers.append(base + place)
            else:
                x = empty(shape, place)
                made.append(x)
                pointers.append(x.data.ptr)
        self.launch(pointers, self._stream().ptr)
        return made

    def keep(self, own: set[int]) -> None:
        """Only these allocated arrays are used after `run`: the others lie in one piece of memory, free again then."""
        size = 0
        for n, (shape, dtype) in enumerate(self.allocations):
            if n not in own:
                self._steps[n] = None, size
                size += -(-prod(shape) * dtype.itemsize // ALIGNED) * ALIGNED
        self._scratch = size

    def launch(self, pointers: list[int], stream: int) -> None:
        """The launches alone, on a stream; pointers: of the arrays given and of those in the place of `allocations`."""
        if not launch.active.is_bound:
            launch.bind()
        with self._lock:
            for words, places, fire, address in self._launches:
                for at, n in places:
                    words[at] = pointers[n]
                fire(stream, address, 0)


class Launcher:
    """One kernel on the device that was current: `launch(stream, address, 0)` launches it with the arguments `words`.

    places: (position in words, index of the array whose pointer is there).
    """

    def __init__(self, record: launch.LaunchRecord, owners: dict[int, int]):
        if record.arrays is None:
            raise LookupError("a launch did not say which arrays it takes")
        cuda, size = launch.cupy().cuda, -(-len(record.arguments) // 8)
        self.words = array("Q", record.arguments.ljust(8 * size, b"\0"))
        pointers = {y.data.ptr for y in record.arrays if y is not None}
        self._constants = [x for x in map(constants.at, pointers - owners.keys()) if x is not None]  # stay alive
        pointers -= {x.data.ptr for x in self._constants}
        self.places = [(at, owners[word]) for at, word in enumerate(self.words) if word in pointers]
        if len({n for _, n in self.places}) < len(pointers):
            raise LookupError("a pointer is not among the arguments")
        self._kernel = launch.kernel(record.file, record.entry, record.constants, record.shared)  # stays loaded
        self._parameters = array("Q", [self.words.buffer_info()[0]])
        self.address = self._parameters.buffer_info()[0]
        shape = (self._kernel.kernel.ptr, record.blocks, 1, 1, record.threads, 1, 1, record.shared)
        self.launch = functools.partial(cuda.driver.launchKernel, *shape)


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
    """What `view_of` described, from another pool."""
    if view is None:
        return None
    if type(view) is View:
        return view(pool)
    kind, parts = view
    return kind(*(get(part, pool) for part in parts))
