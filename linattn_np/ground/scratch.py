"""Working memory of compiled loops: each thread has its own, and keeps no more than KEPT bytes of it between uses."""

from __future__ import annotations

import threading

import numpy as np

KEPT = 16 << 20  # bytes; what a range of tasks needs above that is given back after it
ALIGNED = 64  # bytes of the widest vector


class Scratch(threading.local):
    """A thread's working memory; `place` is the address of `held` and a multiple of ALIGNED."""

    held: np.ndarray | None = None
    size = place = 0

    def take(self, count: int) -> tuple[np.ndarray, int]:
        """(owner, address) of at least `count` bytes: the caller holds the owner while it uses them."""
        if self.held is not None and self.size >= count:
            return self.held, self.place
        held = np.empty(count + ALIGNED, np.uint8)
        place = -(-held.__array_interface__["data"][0] // ALIGNED) * ALIGNED
        if count <= KEPT:
            self.held, self.size, self.place = held, count, place
        return held, place

    def forget(self) -> None:
        """Give back what is kept."""
        self.held, self.size, self.place = None, 0, 0
