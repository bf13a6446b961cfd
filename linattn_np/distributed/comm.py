"""What ranks ask of each other: one collective, and an error instead of waiting for a rank that is gone."""

from __future__ import annotations

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


def late(rank: int, timeout: float) -> RankError:
    """The error of a rank that waited in vain."""
    return RankError(f"distributed: rank {rank} waited {timeout:g} s for the other ranks, expected their answer")
