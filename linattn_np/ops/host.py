"""Whether a formula is a kernel: of NumPy arrays (ops/cpu/formulas.py), for which Numba is there, or of CuPy arrays."""

from __future__ import annotations

import functools
from importlib.util import find_spec
from typing import Any

import numpy as np

from ..runtime.arrays import STORAGE, Array, Namespace, is_cupy, is_numpy, name_of, shared_heads
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


def repeated_heads(xp: Namespace, x: Array, heads: int) -> Array:
    """shared_heads, on NumPy arrays by a kernel."""
    *lead, few, D = x.shape
    if few in (0, heads) or (cpu := numpy_kernels(xp, x)) is None:
        return shared_heads(xp, x, heads)
    one, shape = x[..., None, :], (*lead, few, heads // few, D)
    return cpu.compiled("copy", (one,), (shape, x.dtype), x.dtype).reshape((*lead, heads, D))


def write(xp: Namespace, to: Array, x: Array) -> None:
    """to[...] = x"""
    if (cpu := kernels(xp, to, x)) is not None:
        cpu.put(to, x)
    else:
        refuse("NumPy writes into an array of the caller")
        to[...] = x
