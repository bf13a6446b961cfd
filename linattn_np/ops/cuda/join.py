"""CuPy arrays one after the other in a vector, by few launches and no table in memory (cuda_src/ops/join.cu)."""

from __future__ import annotations

from collections.abc import Sequence

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


def constants(dtype: str) -> Constants:
    """The constants of arrays of this dtype."""
    return (("LA_ITEM", BYTES[dtype]),)


def takes(arrays: Sequence[Array]) -> bool:
    """Whether the kernel joins these arrays of one dtype."""
    here = launch.current_device()
    known = name_of(arrays[0].dtype) in BYTES and launch.unusable() is None
    return known and all(x.device.id == here for x in arrays)


def joined(arrays: Sequence[Array]) -> Array:
    """The numbers of all arrays, each in C order, as a vector."""
    rows = [dense(x) for x in arrays if x.size]
    y = record.empty((sum(x.size for x in rows),), arrays[0].dtype)
    to = 0
    for n in range(0, len(rows), MOST):
        part, parts, blocks = rows[n : n + MOST], list[int](), 0
        for x in part:
            parts += (address(x), to, x.nbytes, blocks)
            to, blocks = to + x.nbytes, blocks - (-x.nbytes // BLOCK)
        parts += NO_PART * (MOST - len(part))
        packed = JOIN.pack(parts=parts, y=address(y), count=len(part))
        launch.launch(SOURCE, "join", constants(name_of(y.dtype)), blocks, THREADS, 0, packed, (*part, y))
    return y
