"""Complex numbers as pairs of real ones; on NumPy arrays by kernels."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..runtime.arrays import Array, Namespace, as_computed, cast, complex_of, is_complex
from ..runtime.constants import constant_zeros
from .host import numpy_kernels
from .product import product


def from_parts(xp: Namespace, re: Array, im: Array | None, dtype: Any) -> Array:
    """re + i im of one shape, in the complex dtype of `dtype`; im None: 0."""
    if (cpu := numpy_kernels(xp, re, im)) is not None:
        from ..runtime.pieces.memory import working

        pairs = working((*re.shape, 2), np.dtype(dtype))
        cpu.put(pairs[..., 0], re)
        cpu.put(pairs[..., 1], constant_zeros(np, (1,), np.dtype(dtype), "cpu") if im is None else im)
        return pairs.view(complex_of(np, pairs.dtype))[..., 0]
    z = xp.astype(cast(xp, re, dtype), complex_of(xp, dtype))
    return z if im is None else z + 1j * xp.astype(cast(xp, im, dtype), z.dtype)


def times_real(xp: Namespace, a: Array, z: Array, dtype: Any) -> Array:
    """a z of real a, in `dtype` or in its complex dtype."""
    if not is_complex(z):
        return product(xp, a, z, dtype=dtype)
    if numpy_kernels(xp, a) is None or not isinstance(z, np.ndarray):
        return cast(xp, a, dtype) * as_computed(xp, z, dtype)
    y = product(xp, a[..., None], pairs_of(z), dtype=dtype)
    return y.view(complex_of(np, y.dtype))[..., 0]


def pairs_of(z: np.ndarray) -> np.ndarray:
    """A complex NumPy array (...) as real numbers (..., 2), as a view."""
    real = z.real
    return np.lib.stride_tricks.as_strided(real, (*z.shape, 2), (*z.strides, real.itemsize), writeable=False)
