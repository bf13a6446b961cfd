"""Constant arrays, such as published decays: computed once, and stored in host memory and on each device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from math import prod
from typing import Any

import numpy as np

from .arrays import Array, Namespace, is_cupy, is_numpy
from .held import emptying
from .recorder import constant

MOST_BYTES = 8 << 20  # of the constants in host memory
FEW_ZEROS = 1 << 14  # numbers of the array of zeros of a GPU


class HostConstants:
    """Constant NumPy arrays by key. They are read-only; the oldest ones go where all would exceed MOST_BYTES."""

    def __init__(self) -> None:
        self._arrays: dict[Hashable, np.ndarray] = {}

    def once(self, key: Hashable, make: Callable[[], np.ndarray]) -> np.ndarray:
        """make(), or the array that it returned before. key: everything that the array depends on."""
        if (found := self._arrays.get(key)) is None:
            found = np.array(make(), order="C")  # its own memory
            found.flags.writeable = False
            self._arrays[key] = found
            while sum(y.nbytes for y in list(self._arrays.values())) > MOST_BYTES:
                self._arrays.pop(next(iter(self._arrays)), None)
        return constant(found)

    def clear(self) -> None:
        """Forget all arrays."""
        self._arrays.clear()


host_constants = HostConstants()
emptying.append(host_constants.clear)


def constant_zeros(xp: Namespace, shape: tuple[int, ...], dtype: Any, where: Any) -> Array:
    """Zeros that are not written to: on a CPU one array for all calls, few on a GPU the first ones of one array."""
    if is_cupy(xp) and 0 < prod(shape) <= FEW_ZEROS:
        make = functools.partial(xp.zeros, (FEW_ZEROS,), dtype=dtype, device=where)
        return constant_array(xp, ("zeros", str(dtype)), where, make)[: prod(shape)].reshape(shape)
    make = functools.partial(xp.zeros, shape, dtype=dtype, device=where)
    return host_constants.once(("zeros", shape, str(dtype)), make) if is_numpy(xp) else make()


def constant_ones(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Ones that are not written to."""
    return host_constants.once(("ones", shape, dtype.name), lambda: np.ones(shape, dtype))


def constant_array(xp: Namespace, key: Hashable, where: Any, make: Callable[[], Array]) -> Array:
    """make(), computed once for NumPy and CuPy. key: everything that the array depends on, except the device `where`.

    The array must not be written to.
    """
    if is_numpy(xp):
        return host_constants.once(key, make)
    if not is_cupy(xp):
        return make()
    from .cuda import constants

    return constants.once(xp, key, where, make)
