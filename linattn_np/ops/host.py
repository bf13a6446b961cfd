"""Whether a formula is a kernel: of NumPy arrays (ops/cpu/formulas.py), for which Numba is there, or of CuPy arrays."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np

from ..runtime.arrays import STORAGE, Array, Namespace, is_cupy, is_numpy, name_of
from ..runtime.memory import place_of
from ..runtime.pieces.memory import empty
from ..runtime.recorder import refuse


@functools.cache
def has_compiler() -> bool:
    """Whether Numba, the compiler of the loops, is installed."""
    return find_spec("numba") is not None


def kernels(xp: Namespace, *arrays: Any) -> Any:
    """The kernels for these arrays (None entries are ignored), or None if array calls compute the formula."""
    if not is_cupy(xp):
        return numpy_kernels(xp, *arrays)
    from .cuda import formulas

    return formulas if formulas.takes(*arrays) else None


def numpy_kernels(xp: Namespace, *arrays: Any) -> Any:
    """Likewise, of NumPy arrays alone: formulas without a CUDA kernel."""
    if not is_numpy(xp) or not has_compiler():
        return None
    for y in arrays:
        if y is None:
            continue
        if not isinstance(y, np.ndarray) or not y.flags.aligned or name_of(y.dtype) not in STORAGE:
            return None
    from .cpu import formulas

    return formulas


def zeros_like(xp: Namespace, x: Array) -> Array:
    """Zeros in the shape and dtype of x, also of whole numbers: a gradient that a call gives to its caller."""
    if (cpu := numpy_kernels(xp)) is None or (kind := f"float{8 * x.dtype.itemsize}") not in STORAGE:
        return xp.zeros_like(x)
    return cpu.zeros((x.size,), np.dtype(kind)).view(x.dtype).reshape(x.shape)


def apart(xp: Namespace, given: Sequence[Any], others: Sequence[Any] = ()) -> list[Any]:
    """The arrays that a call gives to its caller; copies of those that begin where one before, or one of others, does.

    A sum over one row is a view of it. None entries stay, as do arrays of libraries without addresses.
    """
    places, found = {_begin(y) for y in others if y is not None}, []
    for y in given:
        if y is not None and (at := _begin(y)) is not None:
            if at in places:
                to = xp.empty(tuple(y.shape), dtype=y.dtype) if is_cupy(xp) else empty(y.shape, y.dtype)
                write(xp, to, y)
                y = to
            places.add(at)
        found.append(y)
    return found


def _begin(y: Any) -> int | None:
    """The address of the first element; None without one."""
    place = place_of(y) if y.size else None
    return None if place is None else place.address


def write(xp: Namespace, to: Array, x: Array) -> None:
    """to[...] = x"""
    if (cpu := kernels(xp, to, x)) is not None:
        cpu.put(to, x)
    else:
        refuse("NumPy writes into an array of the caller")
        to[...] = x
