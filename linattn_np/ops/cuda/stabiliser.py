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
from .unit_rows import THREADS

SOURCE = "ops/gauge.cu"
MOST_TOKENS = 4096  # of more, array calls over all tokens at once take less time


def takes(a: Array, sequences: Items[Sequence], dtype: Any, positions: Items[int]) -> bool:
    """Whether the kernel computes the gates of a call; a (..., T, H) in float64."""
    few = 0 < a.shape[-2] <= MOST_TOKENS and a.size > 0 and not positions
    return few and a.dtype == np.float64 and np.dtype(dtype) == np.float32 and launch.unusable() is None


def gauge(xp: Any, a: Array, b: Array, m_0: Array, sequences: Items[Sequence]) -> tuple[Array, ...]:
    """(m float64; decay, write and e^{-m} in float32)."""
    a, b, m_0 = (xp.ascontiguousarray(cast(xp, y, d)) for y, d in ((a, xp.float64), (b, xp.float64), (m_0, xp.float32)))
    T, H = a.shape[-2:]
    m = empty(a.shape, np.dtype(np.float64))
    gates = [empty(a.shape, np.dtype(np.float32)) for _ in range(3)]
    ragged = sequences[0].row is not None
    offsets = xp.asarray([0, *(s.stop for s in sequences)], dtype=xp.int64) if ragged else None
    arrays = dict(zip(("a", "b", "m_0", "m", "decay", "write", "least", "offsets"),
                      (a, b, m_0, m, *gates, offsets), strict=True))  # fmt: skip
    count = m_0.size // H
    packed = GAUGE.pack(**{n: address(y) for n, y in arrays.items()}, sequences=count, T=T, heads=H)
    launch.launch(SOURCE, "gauge", (), -(-count * H // THREADS), THREADS, 0, packed, tuple(arrays.values()))
    return m, *gates
