"""Kernels on NumPy arrays: the table of a call's arrays, and tasks that threads share out, each in its own memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from .. import threads
from ..arrays import dtype_name
from .memory import Scratch, address, first_byte
from .piece import JIT, entry, load_pieces
from .workspace import ARRAY, CHANNEL, CHANNELS, STORAGE, Layout, PythonWorkspace, Workspace

STORAGES = {name: n for n, name in enumerate(("float32", "float64", "float16", "bfloat16", "int64"))}
CONVERTED = frozenset(("converted",))  # of pieces

scratch = Scratch()


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
            table[at : at + 2] = address(x), x.strides[-2] if declaration.matrices[name].columns else x.itemsize
        elif name in declaration.numbers:
            table[at : at + 1].view(np.float64)[0] = x
        else:
            table[at] = x
    return table


def call_of(kernel: Any, declaration: Workspace, dtype: str) -> Callable[..., None]:
    """A loaded kernel as a function of (table, whole numbers)."""
    if not JIT:
        return lambda table, *given: kernel(PythonWorkspace(declaration, table, dtype), *given)
    compiled = entry(kernel, dtype)
    return lambda table, *given: compiled(first_byte(table), *given)


def over_tasks(kernel: Any, table: np.ndarray, tasks: int, owners: Any) -> None:
    """A function of (table, first, last) for all tasks, on arrays that `owners` keeps alive, shared out to threads."""

    def work(first: int, last: int, owners: Any = (table, owners)) -> None:
        kernel(table, first, last)

    threads.run(work, tasks, threads.num_threads() if tasks > 1 else 1)


def over_matrices(kernel: Any, declaration: Workspace, values: Mapping[str, Any], tasks: int, dtype: str) -> None:
    """A kernel for all tasks; values: its fields, see `put`."""
    load_pieces((kernel,), dtype)
    table = put(declaration, np.zeros(declaration.size, np.int64), values)
    over_tasks(call_of(kernel, declaration, dtype), table, tasks, values)


class Kernel:
    """A kernel of (first task, last task) for one table, whose matrices lie in a thread's own memory."""

    def __init__(self, body: Any, declaration: Workspace, dtype: str, layout: Layout, numbers: Mapping[str, float],
                 words: frozenset[str]):  # fmt: skip
        load_pieces((body,), dtype, words)
        self.dtype, self.call = dtype, call_of(body, declaration, dtype)
        self.declaration, self.layout = declaration, layout
        self.layout = layout._replace(table=put(declaration, layout.table.copy(), numbers))
        self.arrays = slice(first := declaration.slots[declaration.arrays[0]], first + ARRAY * len(declaration.arrays))
        self._known: tuple[Any, Layout] = None, self.layout  # tasks of the last call, the table with their address

    def __call__(self, arrays: np.ndarray, tasks: np.ndarray, first: int, last: int) -> None:
        """Tasks first..last; arrays: the rows of the table."""
        held, place = scratch.take(self.layout.bytes)
        known, layout = self._known
        if known is not tasks:
            of_tasks = {"tasks": tasks, "tasks_count": len(tasks)}
            layout = self.layout._replace(table=put(self.declaration, self.layout.table.copy(), of_tasks))
            self._known = tasks, layout
        table = layout.placed(place)
        table[self.arrays] = arrays.reshape(-1)
        self.call(table, first, last)
        del held

    def run(self, arrays: np.ndarray, tasks: np.ndarray, bounds: list[int], each: int, count: int, owners: Any
            ) -> None:  # fmt: skip
        """All tasks, `each` at a time, on arrays that `owners` keeps alive.

        Tasks bounds[n]..bounds[n + 1] are executed in turn by one of `count` threads.
        """
        if count == 1 and each >= len(tasks):
            self(arrays, tasks, bounds[0], bounds[-1])
            return

        def task(first: int, last: int, owners: Any = (arrays, tasks, owners)) -> None:
            for n in range(bounds[first], bounds[last], each):
                if threads.cancelled():
                    break
                self(arrays, tasks, n, min(n + each, bounds[last]))

        threads.run(task, len(bounds) - 1, count)
