"""Kernels carried out by threads, each with a table and memory of its own."""

from __future__ import annotations

import functools
from math import prod
from typing import Any

import numpy as np

from ...ops.cpu import storage
from ...runtime import threads
from ...runtime.arrays import dtype_name
from ...runtime.pieces.memory import Scratch, address
from ...runtime.pieces.piece import JIT, entry, load_pieces
from ...runtime.pieces.tiles import lane
from ...runtime.pieces.workspace import ARRAY, CHANNEL, CHANNELS, SHARED, STORAGE, Layout, PythonWorkspace, stored_array
from .. import policy
from . import delta, stick
from .backward import backward
from .forward import forward
from .path_backward import path_backward
from .workspace import (
    ADJOINT_KERNELS,
    ARRAYS,
    ATTENTION,
    BIAS,
    GATES,
    GATES_ADJOINT,
    MEMORY,
    PATH,
    PATH_ADJOINT,
    TASK,
    TILES,
)

STORAGES = {name: n for n, name in enumerate(("float32", "float64", "float16", "bfloat16"))}
FIRST = ATTENTION.slots[ARRAYS[0]]
LAST = FIRST + ARRAY * len(ARRAYS)
KERNELS = {"forward": forward, "backward": backward, "path_vjp": path_backward, "delta": delta.forward,
           "delta_vjp": delta.backward, "stick": stick.forward, "stick_vjp": stick.backward}  # fmt: skip

_own = Scratch()


def groups() -> dict[str, tuple[Any, ...]]:
    """All kernels, by what they are for: what warmup compiles ahead."""
    return {"softmax attention": (forward,), "its gradients": (backward,), "deltaformer": (delta.forward,),
            "deltaformer, gradients": (delta.backward,), "PaTH, gradients": (path_backward,),
            "stick-breaking attention": (stick.forward,), "stick-breaking attention, gradients": (stick.backward,)}


class Table:
    """The arrays of a call as rows of a workspace's table; keeps them alive."""

    def __init__(self, heads: int):
        self.heads, self.kept = heads, list[np.ndarray]()
        self.numbers = np.zeros((len(ARRAYS), ARRAY), np.int64)
        self.numbers[:, SHARED] = 1

    def put(self, name: str, y: np.ndarray | None) -> None:
        """An array (..., T, H, D) whose heads are shared."""
        if y is None:
            return
        y = y.reshape((prod(y.shape[:-3]), *y.shape[-3:])) if y.ndim != 4 else y
        self.kept.append(y)
        shared = max(self.heads // max(y.shape[-2], 1), 1)
        self.numbers[ARRAYS.index(name)] = stored_array(y, y.strides, shared, STORAGES[dtype_name(y)])

    def pieces(self, dtype: str) -> tuple[Any, ...]:
        """What arrays need that `load` cannot copy: another dtype, or numbers apart."""
        x, item = self.numbers, np.dtype(dtype).itemsize
        own = (x[:, STORAGE] == STORAGES[dtype]) & ((x[:, CHANNEL] == item) | (x[:, CHANNELS] == 1))
        return () if (own | (x[:, CHANNELS] == 0)).all() else (storage.load_converted, storage.load_column_converted)


@functools.lru_cache(256)
def layout(dtype: str, sizes: tuple[tuple[str, int], ...], kernel: str) -> Layout:
    """The table of a kind of call."""
    given, W = dict(sizes), lane(dtype)
    up = lambda n: -(-n // W) * W  # noqa: E731
    given |= {"c": given["C"], "n": given["N"], "K_lanes": up(given["K"]), "V_lanes": up(given["V"]),
              "task_fields": len(TASK)}  # fmt: skip
    names = MEMORY[kernel]
    if given["gated"]:
        names |= GATES | (GATES_ADJOINT if kernel in ADJOINT_KERNELS else frozenset())
    if given["biased"]:
        names |= BIAS
    if given["mapped"]:
        names |= PATH | (PATH_ADJOINT if kernel in ADJOINT_KERNELS else frozenset())
    count = lambda field: (given["tiles"] if field in TILES else 1) if field in names else 0  # noqa: E731
    return ATTENTION.layout(given, np.dtype(dtype).itemsize, W, count)


class Kernel:
    """A kernel for one table."""

    def __init__(self, name: str, dtype: str, made: Layout, numbers: dict[str, float], table: Table):
        body = KERNELS[name]
        load_pieces((body, *table.pieces(dtype)), dtype, optional=False)
        self.body, self.dtype, self.arrays = body, dtype, table.numbers
        self.entry = entry(body, dtype) if JIT else None
        own = made.table.copy()
        for field, x in numbers.items():
            at = ATTENTION.slots[field]
            own[at : at + 1].view(np.float64)[0] = x
        own[FIRST:LAST] = table.numbers.ravel()
        self.layout = made._replace(table=own)

    def __call__(self, tasks: np.ndarray, first: int, last: int) -> None:
        """Tasks first..last, in this thread's memory."""
        held, place = _own.take(self.layout.bytes)
        table = self.layout.placed(place)
        at = ATTENTION.slots["tasks"]
        table[at : at + 2] = address(tasks), tasks.strides[0]
        table[ATTENTION.slots["tasks_count"]] = len(tasks)
        if self.entry is not None:
            self.entry(address(table), first, last)
        else:
            self.body(PythonWorkspace(ATTENTION, table, self.dtype), first, last)
        del held


def run(kernel: Kernel, tasks: np.ndarray, operations: float, owners: Any) -> None:
    """A kernel for all tasks, on arrays that `owners` keeps alive."""

    def task(first: int, last: int, owners: Any = (tasks, owners)) -> None:
        for n in range(first, last):
            if threads.cancelled():
                break
            kernel(tasks, n, n + 1)

    threads.run(task, len(tasks), 1 if operations < policy.FEW_OPERATIONS else threads.num_threads())
