"""Memory of the compiled loops: data pointers of NumPy arrays, arrays for results, and scratch memory of a thread.

Reading `__array_interface__` takes one to two microseconds per array, a large part of a decoding step. In NumPy's C ABI
the data pointer follows the object header, where compiled code reads it: a handle is the address of that pointer. On
interpreters with another object layout the pointers are read from the arrays and stored in the table itself.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from array import array
from collections.abc import Callable, Iterator
from ctypes import c_int64
from math import prod
from operator import mul
from typing import Any

import numpy as np

from ..held import emptying
from ..recorder import allocated, flag

HEADER = object.__basicsize__
RETAINED = 16 << 20  # bytes of scratch memory that a thread holds; a larger buffer is freed after its tasks
ALIGNED = 64  # bytes of the widest vector
PAGE = 4096  # bytes; processors compare addresses of loads with those of earlier stores mod PAGE
POOLED = 64 << 20  # bytes of freed results that are held, all together
HELD = 1 << 16  # bytes; results of this size or more lie in memory of the pool
STREAMED = 1 << 20  # bytes; results of this size or more are aligned and written past the caches


class Destinations(threading.local):
    """Destinations of this thread: `empty` returns each once, by shape and dtype; are_aligned: new arrays are aligned.

    Recorded plans call `empty` where there are such arrays, also none of them, instead of None.
    """

    arrays: list[Any] | None = None
    are_aligned = False

    @contextlib.contextmanager
    def filled(self, arrays: list[Any]) -> Iterator[list[Any]]:
        """Calls write their results into these arrays where possible. Returns the arrays that no call used."""
        before, self.arrays = self.arrays, list(arrays)
        try:
            yield self.arrays
        finally:
            self.arrays = before

    @contextlib.contextmanager
    def aligned(self) -> Iterator[None]:
        """Results begin at a multiple of ALIGNED bytes."""
        before, self.are_aligned = (self.arrays, self.are_aligned), True
        self.arrays = self.arrays or []
        try:
            yield
        finally:
            self.arrays, self.are_aligned = before


destinations = Destinations()


def next_destination(shape: tuple[int, ...], dtype: np.dtype) -> Any:
    """The first destination of this shape and dtype, which no other call gets; None without one."""
    if destinations.arrays:
        for n, x in enumerate(destinations.arrays):
            if x.shape == shape and x.dtype == dtype:
                return destinations.arrays.pop(n)
    return None


def up(n: int, whole: int) -> int:
    """n rounded up to a multiple of `whole`."""
    return -(-n // whole) * whole


def empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """A new array that a kernel fills, or one of the destinations."""
    return allocated(_empty(shape, dtype), is_counted=True)


def working(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """A new array that a kernel fills, and that is no result of a call: it is none of the destinations."""
    before, destinations.arrays = destinations.arrays, None
    try:
        return empty(shape, dtype)
    finally:
        destinations.arrays = before


def new_flag() -> np.ndarray:
    """A number 0, for a kernel that sets it to 1 where the call must be computed in full (recorder.py)."""
    return flag(allocated(np.zeros(1, np.int64)))


def _empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    if (found := next_destination(shape, dtype)) is not None:
        return found
    count = prod(shape) * dtype.itemsize
    if count >= HELD:
        return np.ndarray(shape, dtype, pool.take(count))
    return aligned_empty(shape, dtype) if destinations.are_aligned else np.empty(shape, dtype)


class Block:
    """Aligned memory of a large result. When no array refers to it any more, the pool may give it to another one."""

    def __init__(self, memory: np.ndarray, give_back: Callable[[np.ndarray], None]):
        self.memory, self.__array_interface__, self._give_back = memory, memory.__array_interface__, give_back

    def __del__(self) -> None:
        self._give_back(self.memory)


class Pool:
    """Memory of large results that are gone, up to POOLED bytes: the system clears each page of new memory.

    Blocks begin at a page, large NumPy arrays a few bytes behind one: mod PAGE, a loop stores to addresses before those
    of its next loads, and no load waits for a store. Sizes are m 2^k with m = 8..16: up to an eighth more than asked.
    """

    def __init__(self) -> None:
        self._free: dict[int, dict[int, np.ndarray]] = {}  # by their size, the one used last behind the others; by id

    def take(self, count: int) -> np.ndarray:
        """At least `count` bytes: memory that was given back, or new memory."""
        step = 1 << max(count.bit_length() - 4, 0)
        size = -(-count // step) * step
        blocks = self._free.get(size)
        try:
            memory = blocks.popitem()[1] if blocks else None
        except KeyError:  # another thread has it
            memory = None
        if memory is None:
            memory = aligned_empty((size,), np.dtype(np.uint8), PAGE)
        return np.asarray(Block(memory, self.give_back))

    def give_back(self, memory: np.ndarray) -> None:
        """Hold memory; sizes that were not used for the longest time go where all would exceed POOLED bytes."""
        blocks = self._free.pop(memory.size, None) or {}
        self._free[memory.size] = blocks
        blocks[id(memory)] = memory
        while sum(map(mul, self._free, map(len, self._free.values()))) > POOLED:
            first = next(iter(self._free))
            each = self._free.get(first, {})
            each.pop(next(iter(each), None), None)
            if not each:
                self._free.pop(first, None)

    def clear(self) -> None:
        """Free all memory that is held."""
        self._free.clear()


pool = Pool()
emptying.append(pool.clear)


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype, multiple: int = ALIGNED) -> np.ndarray:
    """A new array that begins at a multiple of `multiple` bytes."""
    memory = np.empty(prod(shape) * dtype.itemsize + multiple, np.uint8)
    return np.ndarray(shape, dtype, memory, -address(memory) % multiple)


def address(y: np.ndarray) -> int:
    """Address of the first element."""
    return y.__array_interface__["data"][0]


def first_byte(y: np.ndarray) -> int:
    """Same as `address`, but several times as fast if the pointer can be read from the object's memory."""
    return c_int64.from_address(id(y) + HEADER).value if is_behind_the_header() else address(y)


@functools.cache
def is_behind_the_header() -> bool:
    made = [np.arange(3.0), np.arange(6).reshape(2, 3)[:, ::-1]]
    return all(c_int64.from_address(id(y) + HEADER).value == address(y) for y in made)


def handles(arrays: list[np.ndarray]) -> array[int]:
    """A table of handles, and a 0 that compiled code writes to; the arrays must outlive it."""
    if is_behind_the_header():
        return array("q", [*[id(y) + HEADER for y in arrays], 0])
    count = len(arrays)
    row = array("q", [*[0] * count, 0, *[address(y) for y in arrays]])
    for i in range(count):
        row[i] = place(row) + 8 * (count + 1 + i)
    return row


def place(row: array[int]) -> int:
    """Address of a table."""
    return row.buffer_info()[0]


own = threading.local()  # memory: a thread's scratch memory; place: its first aligned address; size: bytes from there


def scratch(count: int) -> tuple[np.ndarray, int]:
    """(owner, address) of at least `count` bytes; the caller holds a reference to the owner while it uses them."""
    if getattr(own, "size", 0) >= count:
        return own.memory, own.place
    memory = np.empty(count + ALIGNED, np.uint8)
    at = -(-address(memory) // ALIGNED) * ALIGNED
    if count <= RETAINED:
        own.memory, own.size, own.place = memory, count, at
    return memory, at


def forget_scratch() -> None:
    """Free the buffer."""
    own.__dict__.clear()


emptying.append(forget_scratch)
