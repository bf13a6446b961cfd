"""Scratch memory of compiled loops, one buffer per thread; at most RETAINED bytes are held between uses."""

from __future__ import annotations

import threading

import numpy as np

RETAINED = 16 << 20  # bytes; a larger buffer is freed after its range of tasks
ALIGNED = 64  # bytes of the widest vector


class Scratch(threading.local):
    """A thread's scratch memory; `place` is the first aligned address in `held`."""

    held: np.ndarray | None = None
    size = place = 0

    def take(self, count: int) -> tuple[np.ndarray, int]:
        """(owner, address) of at least `count` bytes; the caller holds a reference to the owner while it uses them."""
        if self.held is not None and self.size >= count:
            return self.held, self.place
        held = np.empty(count + ALIGNED, np.uint8)
        place = -(-held.__array_interface__["data"][0] // ALIGNED) * ALIGNED
        if count <= RETAINED:
            self.held, self.size, self.place = held, count, place
        return held, place

    def forget(self) -> None:
        """Free the buffer."""
        self.held, self.size, self.place = None, 0, 0
