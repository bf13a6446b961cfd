"""What ranks ask of each other: one collective, and an error instead of waiting for a rank that is gone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

TIMEOUT = 60.0  # seconds that a rank waits for the others by default


class RankError(RuntimeError):
    """Another rank failed, or did not answer within the time limit. The communicator is of no further use."""


class Comm(Protocol):
    """A group of ranks 0 ... size - 1, each of which makes the same calls in the same order.

    Your own communicator is any object with these three names.
    """

    rank: int
    size: int

    def all_gather(self, x: Any) -> Any:
        """The x of all ranks in their order, (size, n).   x (n,): contiguous, of one length and dtype on all ranks.

        Raises RankError if a rank does not answer.
        """
        ...


class Waiting:
    """A communicator whose answers may be waited for later: GPUs go on meanwhile, since their work is in order.

    is_late: `wait` waits. The communicator's own `begin(x)`, if it has one, returns (what all_gather returns, wait).
    """

    def __init__(self, comm: Comm):
        self.rank, self.size, self._comm = comm.rank, comm.size, comm
        self.is_late, self._waits = False, list[Callable[[], None]]()

    def all_gather(self, x: Any) -> Any:
        begin = getattr(self._comm, "begin", None) if self.is_late else None
        if begin is None:
            return self._comm.all_gather(x)
        every, wait = begin(x)
        self._waits.append(wait)
        return every

    def wait(self) -> None:
        """Return when all answers are there.   Raises RankError."""
        waits, self._waits = self._waits, []
        for wait in waits:
            wait()


def late(rank: int, timeout: float) -> RankError:
    """The error of a rank that waited in vain."""
    return RankError(f"distributed: rank {rank} waited {timeout:g} s for the other ranks, expected their answer")
