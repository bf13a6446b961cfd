"""Whether a formula is a kernel: of NumPy arrays (ops/cpu/formulas.py), for which Numba is there, or of CuPy arrays."""

from __future__ import annotations

import functools
from importlib.util import find_spec
from typing import Any

import numpy as np

from ..runtime.arrays import STORAGE, Namespace, is_cupy, is_numpy, name_of


@functools.cache
def _has_compiler() -> bool:
    return find_spec("numba") is not None


def kernels(xp: Namespace, *arrays: Any) -> Any:
    """The kernels for these arrays (None entries are ignored), or None if array calls compute the formula."""
    if not is_cupy(xp):
        return numpy_kernels(xp, *arrays)
    from .cuda import formulas

    return formulas if formulas.takes(*arrays) else None


def numpy_kernels(xp: Namespace, *arrays: Any) -> Any:
    """Likewise, of NumPy arrays alone: formulas without a CUDA kernel."""
    if not is_numpy(xp) or not _has_compiler():
        return None
    for y in arrays:
        if y is None:
            continue
        if not isinstance(y, np.ndarray) or not y.flags.aligned or name_of(y.dtype) not in STORAGE:
            return None
    from .cpu import formulas

    return formulas
