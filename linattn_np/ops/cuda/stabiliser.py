"""The running maximum of ops/stabiliser.py on CuPy arrays, with the gates that it stabilises, by one kernel."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Any

import numpy as np

from ...runtime.arrays import Array, cast
from ...runtime.cuda import launch
from ...runtime.cuda.record import empty
from ...runtime.shapes import Sequence
from .arguments import GAUGE, address

SOURCE = "ops/gauge.cu"
THREADS, LANES = 1024, 32  # of a block: 32 columns of a sequence, 32 parts of its tokens


def takes(a: Array, sequences: Items[Sequence], dtype: Any, positions: Items[int] | None) -> bool:
    """Whether the kernel computes the gates of a call; a (..., T, H) in float64."""
    return (
        a.size > 0
        and positions is not None
        and not positions
        and a.dtype == np.float64
        and np.dtype(dtype) == np.float32
        and launch.unusable() is None
    )


def gauge(xp: Any, a: Array, b: Array, m_0: Array, sequences: Items[Sequence]) -> tuple[Array, ...]:
    """(m float64; decay, write and e^{-m} in float32)."""
    a, b, m_0 = (xp.ascontiguousarray(cast(xp, y, d)) for y, d in ((a, xp.float64), (b, xp.float64), (m_0, xp.float32)))
    T, H = a.shape[-2:]
    m = empty(a.shape, np.dtype(np.float64))
    gates = [empty(a.shape, np.dtype(np.float32)) for _ in range(3)]
    offsets = offsets_of(xp, sequences)
    arrays = dict(zip(("a", "b", "m_0", "m", "decay", "write", "least", "offsets"),
                      (a, b, m_0, m, *gates, offsets), strict=True))  # fmt: skip
    packed = GAUGE.pack(**{n: address(y) for n, y in arrays.items()}, T=T, heads=H)
    launch.launch(SOURCE, "gauge", (), blocks_of(m_0.size, H), THREADS, 0, packed, tuple(arrays.values()))
    return m, *gates


def offsets_of(xp: Any, sequences: Items[Sequence]) -> Array | None:
    """The first tokens of sequences in one row, and the end; None where each has a row."""
    if sequences[0].row is None:
        return None
    return xp.asarray([0, *(s.stop for s in sequences)], dtype=xp.int64)


def blocks_of(size: int, columns: int) -> int:
    """Blocks of sequences whose first values (sequences, columns) are `size` numbers."""
    return size // columns * -(-columns // LANES)
