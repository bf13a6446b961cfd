"""Kernels carried out by threads, each with a table and memory of its own."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...runtime import threads
from ...runtime.pieces.memory import Scratch, address, first_byte
from ...runtime.pieces.piece import JIT, entry, load_pieces
from ...runtime.pieces.workspace import ARRAY, AT, Layout, PythonWorkspace
from .. import policy
from .workspace import ARRAYS, CHUNK

FIRST = CHUNK.slots[ARRAYS[0]]
SEGMENTS, MAP_SEGMENTS = ARRAYS.index("in_segments"), CHUNK.slots["map_segments"]
LAST = FIRST + ARRAY * len(ARRAYS)

_own = Scratch()


class Kernel:
    """A kernel with the optional pieces that a kind of call needs, for one table."""

    def __init__(self, body: Any, optional: tuple[Any, ...], dtype: str, layout: Layout, numbers: dict[str, float]):
        load_pieces((body, *optional), dtype, optional=False)
        self.body, self.dtype = body, dtype
        self.entry = entry(body, dtype) if JIT else None
        table = layout.table.copy()
        for name, x in numbers.items():
            table[CHUNK.slots[name] : CHUNK.slots[name] + 1].view(np.float64)[0] = x
        shared = layout.own == CHUNK.slots["tasks"]  # all others lie in a thread's own memory
        self.layout = layout._replace(table=table, own=layout.own[~shared])
        self._known: tuple[Any, np.ndarray] = None, table  # tasks of the last call, the table with their address

    def __call__(self, arrays: np.ndarray, tasks: np.ndarray, first: int, last: int) -> None:
        """Tasks first..last, in this thread's memory."""
        held, place = _own.take(self.layout.bytes)
        known, table = self._known
        if known is not tasks:
            self._known = tasks, (table := self._of(tasks))
        table = self.layout._replace(table=table).placed(place)
        table[FIRST:LAST] = arrays.reshape(-1)
        table[MAP_SEGMENTS] = arrays[SEGMENTS, AT]
        if self.entry is not None:
            self.entry(first_byte(table), first, last)
        else:
            self.body(PythonWorkspace(CHUNK, table, self.dtype), first, last)
        del held

    def _of(self, tasks: np.ndarray) -> np.ndarray:
        """The table of calls with these tasks."""
        table, at = self.layout.table.copy(), CHUNK.slots["tasks"]
        table[at : at + 2] = address(tasks), tasks.strides[0]
        table[MAP_SEGMENTS + 1] = 24
        table[CHUNK.slots["tasks_count"]] = len(tasks)
        return table


def run(kernel: Kernel, arrays: np.ndarray, tasks: np.ndarray, bounds: list[int], operations: float,
        owners: Any) -> None:  # fmt: skip
    """A kernel for all tasks, on arrays that lie where `arrays` says and that `owners` keeps alive.

    Tasks bounds[n]..bounds[n + 1] are carried out in turn by one thread.
    """
    if operations < policy.FEW_OPERATIONS:
        kernel(arrays, tasks, bounds[0], bounds[-1])
        return
    each = max(1, int(len(tasks) * policy.MANY_OPERATIONS / operations))

    def task(first: int, last: int, owners: Any = (arrays, tasks, owners)) -> None:
        for n in range(bounds[first], bounds[last], each):
            if threads.cancelled():
                break
            kernel(arrays, tasks, n, min(n + each, bounds[last]))

    threads.run(task, len(bounds) - 1, threads.num_threads())


def forget_memory() -> None:
    """Free this thread's working memory."""
    _own.forget()
