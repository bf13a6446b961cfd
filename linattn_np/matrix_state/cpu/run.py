"""Programs carried out by threads, each with memory, matrices and registers of its own."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...runtime import threads
from .interpreter.machine import carry_out
from .interpreter.program import Program
from .memory import Scratch, address

FEW_OPERATIONS = 2e6  # below, threads cost more than they give
MANY_OPERATIONS = 2e9  # after so many, a fraction of a second, a call can be interrupted
MOST = 64  # programs whose tables a thread keeps


class _Own(Scratch):
    """A thread's working memory, and the tables of programs that lie in it."""

    tables_of: np.ndarray | None = None

    def __init__(self) -> None:
        self.tables: dict[Program, tuple[int, int, tuple[Any, ...]]] = {}

    def forget(self) -> None:
        super().forget()
        self.tables, self.tables_of = {}, None


_own = _Own()


def run(program: Program, scale: float, numbers: np.ndarray, tasks: np.ndarray, bounds: list[int],
        operations: float, owners: Any) -> None:  # fmt: skip
    """A program for all tasks, on arrays that lie where `numbers` says and that `owners` keeps alive.

    Tasks bounds[n]..bounds[n + 1] are carried out in turn by one thread.
    """
    kept = program.table(), numbers, tasks, owners
    code, arrays, table = (address(y) for y in kept[:3])
    loop = carry_out(program.dtype)
    each = max(1, int(len(tasks) * MANY_OPERATIONS / max(operations, 1.0)))

    def task(first: int, last: int, owners: Any = kept) -> None:
        registers, matrices, _held = own_tables(program)
        for n in range(bounds[first], bounds[last], each):
            if threads.cancelled():
                break
            loop(1, scale, code, registers, matrices, arrays, table, n, min(n + each, bounds[last]))

    threads.run(task, len(bounds) - 1, 1 if operations < FEW_OPERATIONS else threads.num_threads())


def own_tables(program: Program) -> tuple[int, int, tuple[Any, ...]]:
    """Addresses of this thread's registers and matrices of a program, and their owners; only a program writes there."""
    held, place = _own.take(program.bytes)
    if held is not _own.held:  # more than a thread keeps
        return _tables(program, held, place)
    known = _own.tables
    if held is not _own.tables_of:
        known.clear()
        _own.tables_of = held
    if program not in known:
        if len(known) >= MOST:
            known.clear()
        known[program] = _tables(program, held, place)
    return known[program]


def _tables(program: Program, held: np.ndarray, place: int) -> tuple[int, int, tuple[Any, ...]]:
    tables = program.registers(), program.placed(place)
    return address(tables[0]), address(tables[1]), (held, *tables)


def forget_memory() -> None:
    """Give this thread's working memory back."""
    _own.forget()
