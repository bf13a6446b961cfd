"""Detects NumPy inputs of a vjp that were changed in place before the pullback, which reads them.

A copy of every input would double the memory. Arrays of up to WHOLE elements are copied, larger ones sampled at MOST
evenly spaced elements: new contents are detected, a few changed elements of a large array may not be.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import numpy as np

WHOLE, MOST = 4096, 1024  # a few microseconds for an array that is not in a cache

Marks = list[tuple[str, np.ndarray, bytes]]  # name, the caller's array, its bytes

_by_caller: ContextVar[bool] = ContextVar("by_caller", default=False)


@contextlib.contextmanager
def marked_by_caller() -> Iterator[None]:
    """Context: `mark` marks nothing, since the caller has marked the inputs, and its other arrays are its own."""
    before = _by_caller.set(True)
    try:
        yield
    finally:
        _by_caller.reset(before)


def mark(inputs: Mapping[str, Any]) -> Marks:
    """Samples of the NumPy arrays, to compare later."""
    if _by_caller.get():
        return []
    return [(name, x, _sample(x)) for name, x in inputs.items() if isinstance(x, np.ndarray)]


def check_unchanged(fn: str, marks: Marks) -> None:
    """Raise RuntimeError if a sample of an input has changed."""
    for name, x, before in marks:
        if _sample(x) != before:
            raise RuntimeError(
                f"{fn}: {name} was changed in place after vjp, expected the inputs of vjp to stay as "
                "they are until the last pullback, which reads them again: give vjp a copy"
            )


def _sample(x: np.ndarray) -> bytes:
    """The sampled bytes; evenly spaced slices of an array that is not contiguous."""
    if x.size <= WHOLE:
        return x.tobytes()
    y = x if x.flags.c_contiguous else x.transpose(sorted(range(x.ndim), key=lambda axis: -x.strides[axis]))
    if y.flags.c_contiguous:
        return y.reshape(-1)[:: _step(y.size)].tobytes()
    while y.size > MOST:
        longest = y.shape.index(max(y.shape))
        y = y[(*(slice(None),) * longest, slice(None, None, _step(y.size)))]
    return y.tobytes()


def _step(size: int) -> int:
    """An odd stride: a power of two would always sample the same channels."""
    return -(-size // MOST) | 1
