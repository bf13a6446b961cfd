"""What a call launches and allocates, recorded while it is computed.

with Recorder() as recorder:
    ...                          kernels and allocations of this thread are appended

A recorded call is its launches on other arrays. Whoever computes something by other means, or looks at the numbers of
an array, says so by `refuse`: the call is then computed anew each time. A kernel looks at numbers, too: it sets a flag
where a repeated call must be computed in full, because it is an error.
"""

from __future__ import annotations

import threading
from typing import Any

Array = Any


MOST_BYTES = 64 << 20  # of arrays of the host, or of formulas: while a call is recorded, all of them are alive


class Recorder:
    """The launches of this thread and the arrays allocated for them, while it is entered."""

    def __init__(self) -> None:
        self.launches: list[Any] = []
        self.allocated: list[Array] = []
        self.constants: list[Array] = []  # arrays that depend on nothing but the options of the call
        self.flags: list[Array] = []  # allocated numbers 0, which kernels set to 1
        self.checks: list[Any] | None = None  # of integers, which repeated calls make first; None: there may be none
        self.obstacle = ""  # why the call cannot be recorded
        self.left = MOST_BYTES  # that may still be allocated

    def __enter__(self) -> Recorder:
        self._before, active.recorder = active.recorder, self
        return self

    def __exit__(self, *error: object) -> None:
        active.recorder = self._before

    def give_up(self, reason: str) -> None:
        """Record no more, and hold nothing."""
        self.launches.clear()
        self.allocated.clear()
        self.flags.clear()
        self.obstacle, active.recorder = reason, None


class Active(threading.local):
    """The recorder of this thread."""

    recorder: Recorder | None = None


active = Active()


def allocated(x: Array, is_counted: bool = False) -> Array:
    """x, an array that a kernel will fill, and that a repeated call allocates anew.

    is_counted: nothing is recorded any more once such arrays take more than MOST_BYTES.
    """
    if (recorder := active.recorder) is not None:
        recorder.allocated.append(x)
        recorder.left -= x.nbytes if is_counted else 0
        if recorder.left < 0:
            recorder.give_up("it takes too much memory")
    return x


def constant(x: Array) -> Array:
    """x, an array that depends on nothing but the options of a call, and that nobody writes to."""
    if active.recorder is not None:
        active.recorder.constants.append(x)
    return x


def flag(x: Array) -> Array:
    """x, an allocated number 0: a call is computed in full, and its next launches not executed, where it becomes 1."""
    if active.recorder is not None:
        active.recorder.flags.append(x)
    return x


def refuse(reason: str) -> None:
    """The call that is being recorded does more than its launches."""
    if active.recorder is not None:
        active.recorder.give_up(reason)
