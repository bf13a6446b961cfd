"""1 - e^g on CuPy arrays, and the gradient of g."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...runtime.arrays import Array, dtype_name
from ...runtime.cuda import launch
from ...runtime.cuda.elements import ELEMENTS, Constants
from .arguments import COMPLEMENT, address
from .unit_rows import THREADS

SOURCE = "ops/complement.cu"
PER = 8  # numbers of a thread, moved 16 bytes at a time


def takes(g: Array, keys: Any, dg: Array | None = None, dk: Array | None = None) -> bool:
    """Whether the kernels support these log decays, keys of this dtype, and gradients of both."""
    arrays = [y for y in (g, dg, dk) if y is not None]
    dense = all(y.flags.c_contiguous and y.shape == g.shape and y.data.ptr % 16 == 0 for y in arrays)
    known = {dtype_name(g), np.dtype(keys).name} <= ELEMENTS.keys() and (dg is None or dg.dtype == g.dtype)
    return dense and known and g.size > 0 and g.size % PER == 0 and launch.unusable() is None


def constants(gate: str, keys: str) -> Constants:
    """The constants for log decays and keys of these dtypes."""
    return ("LA_DTYPE", ELEMENTS[gate]), ("LA_KEYS", ELEMENTS[keys])


def complement(xp: Any, g: Array, keys: Any) -> Array:
    """1 - e^g in the dtype of keys."""
    k = xp.empty(g.shape, dtype=keys)
    _launch("complement", g, k, k)
    return k


def complement_vjp(xp: Any, g: Array, dg: Array, dk: Array) -> Array:
    """dg - e^g dk, in the dtype of g."""
    y = xp.empty(g.shape, dtype=g.dtype)
    _launch("complement_vjp", g, y, dk, dk=dk, dg=dg)
    return y


def _launch(entry: str, g: Array, y: Array, keys: Array, **given: Array) -> None:
    """keys: an array of the keys' dtype. given: dk, dg."""
    packed = COMPLEMENT.pack(
        g=address(g), dk=address(given.get("dk")), dg=address(given.get("dg")), y=address(y), size=g.size
    )
    launch.launch(
        SOURCE,
        entry,
        constants(dtype_name(g), dtype_name(keys)),
        -(-g.size // (PER * THREADS)),
        THREADS,
        0,
        packed,
        (g, y, *given.values()),
    )
