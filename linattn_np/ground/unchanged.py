"""Whether NumPy inputs of a vjp are still what they were when its pullback comes: it reads them again.

A copy of every input would cost as much memory as the inputs. So arrays of up to MOST numbers are kept whole, and of
larger ones MOST numbers, evenly spread: new contents are found, a few changed numbers in a large array may not be.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

MOST = 4096  # numbers that are compared: under 1 us an array of float32, a token of 4096 numbers is never missed

Marks = list[tuple[str, np.ndarray, bytes]]  # name, the caller's array, what is compared


def mark(given: Mapping[str, Any]) -> Marks:
    """What is compared later; nothing for what is no NumPy array."""
    return [(name, x, _sample(x)) for name, x in given.items() if isinstance(x, np.ndarray)]


def check_unchanged(fn: str, marks: Marks) -> None:
    """Raise RuntimeError if an input is seen to be another one than it was."""
    for name, x, before in marks:
        if _sample(x) != before:
            raise RuntimeError(f"{fn}: {name} was changed in place after vjp, expected the inputs of vjp to stay as "
                               "they are until the last pullback, which reads them again: give vjp a copy")


def _sample(x: np.ndarray) -> bytes:
    """The numbers that are compared; of an array with gaps evenly spread tokens."""
    if x.size <= MOST:
        return x.tobytes()
    y = x if x.flags.c_contiguous else x.transpose(sorted(range(x.ndim), key=lambda axis: -x.strides[axis]))
    if y.flags.c_contiguous:
        return y.reshape(-1)[:: _step(y.size)].tobytes()
    while y.size > MOST:
        y = np.moveaxis(y, int(np.argmax(y.shape)), 0)[:: _step(y.size)]
    return y.tobytes()


def _step(size: int) -> int:
    """Odd: a power of two would always meet the same channel."""
    return -(-size // MOST) | 1
