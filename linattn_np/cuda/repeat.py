"""Launches that were written down, to be made again with other pointers: nothing is decided twice."""

from __future__ import annotations

import functools
import threading
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

from . import constants, launch

Shape = tuple[int, ...]


class Allocating:
    """An array namespace that remembers the arrays its `empty` made."""

    def __init__(self, xp: Any):
        self._xp = xp
        self.made: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._xp, name)

    def empty(self, shape: Shape, **options: Any) -> Any:
        self.made.append(self._xp.empty(shape, **options))
        return self.made[-1]


class Seen(NamedTuple):
    """What a call launched, and the arrays that it allocated for that."""

    launches: list[launch.Written]
    made: list[Any]


class Repeat:
    """The launches of a call, made again on other arrays of the same layout.

    They must be all that the call did on the device: nothing but `empty` made the arrays that are not given.
    """

    def __init__(self, seen: Seen, given: Sequence[Any]):
        """Raises LookupError unless every pointer of every launch is that of one array given, allocated or constant.

        And for an allocated array that no launch takes: array calls filled it, which are not made again.
        """
        taken = {y.data.ptr for one in seen.launches for y in one.arrays or () if y is not None}
        if any(x.data.ptr not in taken for x in seen.made):
            raise LookupError("an array was allocated for something else than a launch")
        owners = {x.data.ptr: n for n, x in enumerate([*given, *seen.made])}
        if len(owners) < len(given) + len(seen.made):
            raise LookupError("two arrays begin at one place")
        self._empty, self._new = launch.array_type(), [(tuple(x.shape), x.dtype) for x in seen.made]
        self._launches = [Launcher(written, owners) for written in seen.launches]

    def __call__(self, pointers: list[int]) -> list[Any]:
        """pointers: of the arrays given; it grows. The arrays that were allocated, in order."""
        made = []
        for shape, dtype in self._new:
            x = self._empty(shape, dtype)
            made.append(x)
            pointers.append(x.data.ptr)
        for fire in self._launches:
            fire(pointers)
        return made


class Launcher:
    """One kernel on the device that was current, launched with other pointers among its arguments.

    The driver copies arguments at the launch, so one buffer serves all launches, one at a time.
    """

    def __init__(self, written: launch.Written, owners: dict[int, int]):
        if written.arrays is None:
            raise LookupError("a launch did not say which arrays it takes")
        cuda, size = launch.cupy().cuda, -(-len(written.arguments) // 8)
        self._words = array("Q", written.arguments.ljust(8 * size, b"\0"))
        pointers = {y.data.ptr for y in written.arrays if y is not None}
        self._constants = [x for x in map(constants.at, pointers - owners.keys()) if x is not None]  # stay alive
        pointers -= {x.data.ptr for x in self._constants}
        self._places = [(at, owners[word]) for at, word in enumerate(self._words) if word in pointers]
        if len({n for _, n in self._places}) < len(pointers):
            raise LookupError("a pointer is not among the arguments")
        kernel = launch.kernel(written.file, written.entry, written.constants, written.shared)
        self._parameters = array("Q", [self._words.buffer_info()[0]])
        self._address, self._kept = self._parameters.buffer_info()[0], kernel  # the module stays loaded
        shape = (kernel.kernel.ptr, written.blocks, 1, 1, written.threads, 1, 1, written.shared)
        self._launch, self._stream = functools.partial(cuda.driver.launchKernel, *shape), cuda.get_current_stream
        self._lock = threading.Lock()

    def __call__(self, pointers: Sequence[int]) -> None:
        words = self._words
        with self._lock:
            for at, n in self._places:
                words[at] = pointers[n]
            self._launch(self._stream().ptr, self._address, 0)
