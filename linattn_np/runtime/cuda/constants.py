"""Constant arrays such as published decays: computed once per GPU, since each takes several launches."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from ..recorder import active as recording
from . import launch

Array = Any
MOST, MOST_BYTES = 256, 8 << 20  # cached arrays at most, of all GPUs; none is freed: another stream may be reading it

_cached: dict[Hashable, Array] = {}


def once(xp: Any, key: Hashable, where: Any, make: Callable[[], Array]) -> Array:
    """make(), cached for CuPy arrays. key: everything that the array depends on, except the device `where`.

    The array must not be written to. The first call waits for the array, since a later call may use another stream. An
    array computed during the capture of a CUDA graph belongs to that graph and is not cached.
    """
    if not xp.__name__.endswith("cupy"):
        return make()
    key = (str(where), key)
    if (array := _cached.get(key)) is None:
        recorder, recording.recorder = recording.recorder, None  # no part of the call
        try:
            array, cuda = make(), launch.cupy().cuda
        finally:
            recording.recorder = recorder
        stream = cuda.get_current_stream(array.device.id)
        if is_cacheable(array.nbytes) and not cuda.runtime.streamIsCapturing(stream.ptr):
            stream.synchronize()
            _cached[key] = array
    return array


def is_cacheable(size: int) -> bool:
    """Whether there is place for an array of `size` bytes."""
    return len(_cached) < MOST and size + sum(x.nbytes for x in list(_cached.values())) <= MOST_BYTES


def at(pointer: int) -> Array | None:
    """The cached array at an address."""
    return next((x for x in list(_cached.values()) if x.data.ptr == pointer), None)
