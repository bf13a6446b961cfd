"""Programs carried out by threads, each with memory, matrices and registers of its own."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from ...ground import threads
from ...ground.handles import address
from ..numba_machine import carry_out
from ..numba_program import Program

FEW_OPERATIONS = 2e6  # below, threads cost more than they give
MOST = 64  # programs whose tables a thread keeps
_own = threading.local()


def run(program: Program, scale: float, numbers: np.ndarray, tasks: np.ndarray, bounds: list[int],
        operations: float) -> None:  # fmt: skip
    """A program for all tasks, on arrays that lie where `numbers` says.

    Tasks bounds[n]..bounds[n + 1] are carried out in turn by one thread.
    """
    code, arrays, table = (address(y) for y in (program.table(), numbers, tasks))
    loop = carry_out(program.dtype)

    def task(first: int, last: int) -> None:
        registers, matrices = own_tables(program)
        loop(1, scale, code, registers, matrices, arrays, table, bounds[first], bounds[last])

    threads.run(task, len(bounds) - 1, 1 if operations < FEW_OPERATIONS else threads.num_threads())


def own_tables(program: Program) -> tuple[int, int]:
    """Addresses of this thread's registers and matrices of a program; only a program writes to its own."""
    held = memory(program.bytes)
    known = _own.tables
    if program not in known:
        if len(known) >= MOST:
            known.clear()
        tables = program.registers(), program.placed(address(held))
        known[program] = address(tables[0]), address(tables[1]), tables
    return known[program][:2]


def memory(count: int) -> np.ndarray:
    """This thread's working memory, at least `count` bytes and 64 to align them."""
    held: Any = getattr(_own, "memory", None)
    if held is None or held.size < count + 64:
        held = _own.memory = np.empty(count + 64, np.uint8)
        _own.tables = {}
    return held


def forget_memory() -> None:
    """Give this thread's working memory back."""
    _own.memory, _own.tables = None, {}
