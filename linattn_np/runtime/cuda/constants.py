"""Constant arrays such as published decays: computed once per GPU, since each takes several launches."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from . import launch

Array = Any
MOST = 256  # most cached arrays; none is freed, since another stream may be reading it

_kept: dict[Hashable, Array] = {}


def once(xp: Any, key: Hashable, where: Any, make: Callable[[], Array]) -> Array:
    """make(), cached for CuPy arrays. key: everything that the array depends on, except the device `where`.

    The array must not be written to. The first call waits for the array, since a later call may use another stream. An
    array computed during the capture of a CUDA graph belongs to that graph and is not cached.
    """
    if not xp.__name__.endswith("cupy"):
        return make()
    key = (str(where), key)
    if (array := _kept.get(key)) is None:
        array, cuda = make(), launch.cupy().cuda
        stream = cuda.get_current_stream(array.device.id)
        if len(_kept) < MOST and not cuda.runtime.streamIsCapturing(stream.ptr):
            stream.synchronize()
            _kept[key] = array
    return array


def at(pointer: int) -> Array | None:
    """The cached array at an address."""
    return next((x for x in list(_kept.values()) if x.data.ptr == pointer), None)
