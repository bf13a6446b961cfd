"""Constant arrays, such as published decays, cached per device."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from .arrays import Array, Namespace, is_cupy, is_deferred


def constant_array(xp: Namespace, key: Hashable, where: Any, make: Callable[[], Array]) -> Array:
    """make(), cached for CuPy arrays. key: everything that the array depends on, except the device `where`.

    The array must not be written to.
    """
    if is_deferred(xp):
        from .cuda.fusion import constant

        return constant(xp, key, where, make)
    if not is_cupy(xp):
        return make()
    from .cuda import constants

    return constants.once(xp, key, where, make)
