"""Arrays that are the same in every call, as published decays: on a GPU made once, for it takes several launches."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from . import launch

Array = Any
MOST = 256  # that are cached; none is freed, since another stream may be reading it

_kept: dict[Hashable, Array] = {}


def once(xp: Any, key: Hashable, where: Any, make: Callable[[], Array]) -> Array:
    """make(); of CuPy arrays the one that was made first. key: all that it depends on but the device `where`.

    Nobody may write to it. A later call may be on another stream, so that the first one waits for the array; one that
    is made while its stream is captured belongs to that graph and is not cached.
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
    """The cached array that begins there."""
    return next((x for x in list(_kept.values()) if x.data.ptr == pointer), None)
