"""CuPy's namespace, whose allocations are recorded; its moves of numbers are launches of one kernel (formula.cu).

Casts, copies, repeats, concatenations, constants of few numbers; of more they are CuPy's own, which are not recorded.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from ...runtime.arrays import Array
from ...runtime.cuda import launch
from ...runtime.cuda.record import Shape, empty
from ...runtime.recorder import active as recording
from ...runtime.recorder import allocated
from . import formulas

MOST = 1 << 20  # numbers; of more, a launch is not what takes the time


class Namespace:
    """The namespace `xp`, which reports to the recorder that is entered: allocations, and moves of numbers."""

    def __init__(self, xp: Any):
        self._xp = xp

    def __getattr__(self, name: str) -> Any:
        return getattr(self._xp, name)

    def empty(self, shape: Shape, **options: Any) -> Array:
        """A new array."""
        return allocated(self._xp.empty(shape, **options))

    def astype(self, x: Array, dtype: Any, **options: Any) -> Array:
        """x in another dtype."""
        known = np.dtype(dtype).name in formulas.KINDS and self._records(x)
        return self._copied(x, dtype) if known else self._xp.astype(x, dtype, **options)

    def ascontiguousarray(self, x: Array) -> Array:
        """x in C order; x itself if it is."""
        if x.flags.c_contiguous or not self._records(x):
            return self._xp.ascontiguousarray(x)
        return self._copied(x, x.dtype)

    def concat(self, arrays: Sequence[Array], *, axis: int = 0) -> Array:
        """Arrays one after the other along an axis."""
        dtypes = {y.dtype for y in arrays}
        if len(dtypes) > 1 or not self._records(*arrays):
            return self._xp.concat(arrays, axis=axis)
        axis, (dtype,), at = axis % arrays[0].ndim, dtypes, 0
        shape = list(arrays[0].shape)
        shape[axis] = sum(y.shape[axis] for y in arrays)
        out = empty(tuple(shape), dtype)
        for y in arrays:
            n = y.shape[axis]
            formulas.compiled("copy", (y,), out[(slice(None),) * axis + (slice(at, at + n),)], _wide(dtype))
            at += n
        return out

    def repeat(self, x: Array, repeats: int, *, axis: int) -> Array:
        """Every entry along an axis `repeats` times."""
        if not self._records(x):
            return self._xp.repeat(x, repeats, axis=axis)
        at = axis % x.ndim + 1
        lead, rest = x.shape[:at], x.shape[at:]
        one = x.reshape(*lead, 1, *rest)
        out = formulas.compiled("copy", (one,), ((*lead, repeats, *rest), x.dtype), _wide(x.dtype))
        return out.reshape(*lead[:-1], lead[-1] * repeats, *rest)

    def zeros(self, shape: Shape, *, dtype: Any = None, device: Any = None) -> Array:
        """Zeros."""
        return self._full(shape, 0.0, dtype) if self._is_few(shape, dtype, device) else self._xp.zeros(
            shape, dtype=dtype, device=device)  # fmt: skip

    def ones(self, shape: Shape, *, dtype: Any = None, device: Any = None) -> Array:
        """Ones."""
        return self._full(shape, 1.0, dtype) if self._is_few(shape, dtype, device) else self._xp.ones(
            shape, dtype=dtype, device=device)  # fmt: skip

    def zeros_like(self, x: Array, **options: Any) -> Array:
        """Zeros of x's shape and dtype."""
        return self._full(x.shape, 0.0, x.dtype) if self._records(x) and not options else self._xp.zeros_like(
            x, **options)  # fmt: skip

    def ones_like(self, x: Array, **options: Any) -> Array:
        """Ones of x's shape and dtype."""
        return self._full(x.shape, 1.0, x.dtype) if self._records(x) and not options else self._xp.ones_like(
            x, **options)  # fmt: skip

    def _full(self, shape: Shape, value: float, dtype: Any) -> Array:
        return formulas.compiled("filled", (), (tuple(shape), np.dtype(dtype)), _wide(dtype), value)

    def _copied(self, x: Array, dtype: Any) -> Array:
        wide = "float64" if np.float64 in (x.dtype, np.dtype(dtype)) else "float32"
        return formulas.compiled("copy", (x,), (tuple(x.shape), np.dtype(dtype)), wide)

    def _records(self, *arrays: Array) -> bool:
        """Whether a function of these arrays is a launch."""
        few = recording.recorder is not None and sum(y.size for y in arrays) <= MOST
        return few and all(y.ndim for y in arrays) and formulas.takes(*arrays)

    def _is_few(self, shape: Any, dtype: Any, device: Any) -> bool:
        known = isinstance(shape, tuple) and dtype is not None and np.dtype(dtype).name in formulas.KINDS
        known = known and getattr(device, "id", device) in (None, launch.current_device())
        return known and recording.recorder is not None and prod(shape) <= MOST and launch.unusable() is None


def _wide(dtype: Any) -> str:
    return "float64" if np.dtype(dtype) == np.float64 else "float32"


@functools.cache
def namespace(xp: Any) -> Namespace:
    """CuPy's namespace, whose allocations and moves are recorded."""
    return Namespace(xp)
