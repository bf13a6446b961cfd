"""Ranks that are threads of this process: for tests, and to try things out."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from .comm import TIMEOUT, RankError, late


class Threads:
    """One of `size` ranks that are threads, of NumPy arrays.   Threads.of(size): all of them, for you to distribute."""

    def __init__(self, rank: int, slots: list[Any], barrier: threading.Barrier, timeout: float):
        self.rank, self.size = rank, len(slots)
        self._slots, self._barrier, self._timeout = slots, barrier, timeout

    @classmethod
    def of(cls, size: int, timeout: float = TIMEOUT) -> list[Threads]:
        """The communicators of all ranks. A rank waits at most `timeout` seconds for the others."""
        slots, barrier = [None] * size, threading.Barrier(size)
        return [cls(rank, slots, barrier, timeout) for rank in range(size)]

    def all_gather(self, x: Any) -> Any:
        self._slots[self.rank] = x
        self._wait()
        every = np.stack(self._slots)
        self._wait()  # before a slot is written again
        return every

    def abort(self) -> None:
        """Make every rank that waits, now or later, raise a RankError."""
        self._barrier.abort()

    def _wait(self) -> None:
        aborted = self._barrier.broken
        try:
            self._barrier.wait(self._timeout)
        except threading.BrokenBarrierError:
            if aborted or not self._barrier.broken:
                raise RankError(f"distributed: rank {self.rank} waits for a rank that failed") from None
            raise late(self.rank, self._timeout) from None


def in_threads(size: int, work: Callable[[Threads], Any], timeout: float = TIMEOUT) -> list[Any]:
    """[work(comm) of every rank], each in a thread.   Raises the first error that is no RankError, else that."""
    ranks = Threads.of(size, timeout)

    def guarded(comm: Threads) -> Any:
        try:
            return work(comm)
        except BaseException:
            comm.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        each = [pool.submit(guarded, comm) for comm in ranks]
    errors = sorted(filter(None, (one.exception() for one in each)), key=lambda error: isinstance(error, RankError))
    if errors:
        raise errors[0]
    return [one.result() for one in each]
