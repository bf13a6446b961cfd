"""Kernels of the systems of a SOLVED read-out, to be compiled ahead."""

from __future__ import annotations

from collections.abc import Iterator

from ....runtime.cuda.entries import SHARED, Entry
from .plan import kernels_of


def system_entries(dtype: str, K: int, capability: int) -> Iterator[Entry]:
    """The kernels of systems of K unknowns; none where a block does not fit."""
    found = kernels_of(K, dtype, K % 2 == 0, SHARED[capability] * 1024)
    for words, kernel in () if found is None else (("matrices", found.states), ("solutions", found.iterate)):
        yield Entry(f"systems, {words}", kernel.file, kernel.constants)
