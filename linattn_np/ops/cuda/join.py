"""CuPy arrays one after the other in a vector, and as sequences of another length, by few launches (ops/join.cu)."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import numpy as np

from ...runtime.arrays import Array, name_of
from ...runtime.cuda import launch, record
from ...runtime.cuda.elements import Constants
from .arguments import JOIN, JOIN_PART, address
from .row_arrays import dense
from .unit_rows import THREADS

SOURCE = "ops/join.cu"
MOST, BLOCK = 100, 16384  # arrays of a launch, bytes of a block
BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
NO_PART = (0,) * len(JOIN_PART.fields)
ALIGNED = 256  # bytes, of the arrays of an allocation


def constants(dtype: str) -> Constants:
    """The constants of arrays of this dtype."""
    return (("LA_ITEM", BYTES[dtype]),)


def takes(arrays: Sequence[Array]) -> bool:
    """Whether the kernel joins these arrays of one dtype."""
    here = launch.current_device()
    known = name_of(arrays[0].dtype) in BYTES and launch.unusable() is None
    return known and all(x.device.id == here for x in arrays)


def resizes(arrays: Sequence[Array], T: int) -> bool:
    """Whether `resized` takes these arrays, and one launch is enough."""
    return all(map(takes, zip(arrays))) and 2 * sum(x.shape[0] // T for x in arrays) <= MOST


def joined(arrays: Sequence[Array]) -> Array:
    """The numbers of all arrays, each in C order, as a vector."""
    rows, parts = [dense(x) for x in arrays if x.size], list[Part]()
    y = record.empty((sum(x.size for x in rows),), arrays[0].dtype)
    to = 0
    for x in rows:
        parts.append(Part(x, address(x), to, x.nbytes))
        to += x.nbytes
    _launch(parts, y, BYTES[name_of(y.dtype)])
    return y


def resized(arrays: Sequence[Array], T: int, long: int) -> list[Array]:
    """Sequences of T rows as sequences of `long`: their first rows, zeros after them, of arrays (rows, ...).

    One array is an allocation, several ones are parts of one.
    """
    arrays, shapes = [dense(x) for x in arrays], [(x.shape[0] // T * long, *x.shape[1:]) for x in arrays]
    sizes = [prod(shape) * x.itemsize for shape, x in zip(shapes, arrays, strict=True)]
    if len(arrays) == 1:
        y = record.empty(shapes[0], arrays[0].dtype)
    else:
        y = record.empty((sum(-(-n // ALIGNED) * ALIGNED for n in sizes),), np.dtype(np.int8))
    parts, found, to = list[Part](), list[Array](), 0
    for x, shape, size in zip(arrays, shapes, sizes, strict=True):
        row = x.nbytes // x.shape[0]
        for n in range(x.shape[0] // T):
            parts.append(Part(x, address(x) + n * T * row, to + n * long * row, min(T, long) * row))
            if long > T:
                parts.append(Part(None, 0, to + (n * long + T) * row, (long - T) * row))
        found.append(y if len(arrays) == 1 else y[to : to + size].view(x.dtype).reshape(shape))
        to += -(-size // ALIGNED) * ALIGNED
    _launch(parts, y, min(x.itemsize for x in arrays))
    return found


class Part(NamedTuple):
    """Bytes of an array, None: zeros, that go to byte `to` of the result."""

    x: Array | None
    begin: int
    to: int
    bytes: int


def _launch(parts: Sequence[Part], y: Array, item: int) -> None:
    for n in range(0, len(parts), MOST):
        own, fields, blocks = parts[n : n + MOST], list[int](), 0
        for part in own:
            fields += (part.begin, part.to, part.bytes, blocks)
            blocks -= -part.bytes // BLOCK
        fields += NO_PART * (MOST - len(own))
        packed = JOIN.pack(parts=fields, y=address(y), count=len(own))
        named = (*{id(p.x): p.x for p in own if p.x is not None}.values(), y)
        launch.launch(SOURCE, "join", (("LA_ITEM", item),), blocks, THREADS, 0, packed, named)
