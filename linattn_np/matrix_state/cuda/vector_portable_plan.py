"""How the portable CUDA kernels of a vector decay are cut up. Pure functions of dtype and shape."""

from __future__ import annotations

import functools
from typing import NamedTuple

from ...runtime.cuda.elements import BYTES, ELEMENTS, Constants
from .. import policy
from .delta_plan import Kernel
from .shared_memory import round_up

FILES = {"values": "vector_portable/values.cu", "channels": "vector_portable/channels.cu"}
CHUNK, ROW, COLUMN = 16, 20, 24  # tokens; floats of a row of them, of one that is read in pairs
MARK = policy.RECURRENCE_MARK


class PortableKind(NamedTuple):
    """What the kernels of a call are compiled for."""

    K: int
    V: int
    element: str
    gate: str
    align: int  # bytes that every row's address and length are a multiple of
    erase: bool = False  # the delta rule
    before: bool = False  # queries read the previous state
    bonus: bool = False


class Launch(NamedTuple):
    """A kernel with its constants, and the blocks of a sequence and head."""

    kernel: Kernel
    constants: Constants
    parts: int

    @property
    def shared(self) -> int:
        """Bytes of a block."""
        return dict(self.constants)["LA_SHARED"]


def values_shared(kind: PortableKind, warps: int) -> int:
    """vector_portable/values.cu: stages of q, k, g; rows of a warp; pairs, their sums; scaled rows and columns."""
    keys, erase, square = round_up(kind.K, 16), kind.erase, CHUNK * CHUNK * 4
    turns, active = -(-keys // 16 // warps), min(keys // 16, warps)
    stages = turns * (2 * BYTES[kind.element] + BYTES[kind.gate]) * 8 * 32 * warps
    rows = warps * (2 + erase) * CHUNK * ROW * 4
    pairs = (1 + erase) * (active * square + CHUNK * COLUMN * 4) + erase * CHUNK * (ROW + 1) * 4
    buffers = 1 if kind.K > policy.WIDEST_GROUP or kind.erase else 2
    return stages + rows + pairs + (1 + erase) * CHUNK * (keys + 8) * 4 + keys * (buffers * COLUMN + 1) * 4


def channels_shared(kind: PortableKind, warps: int) -> int:
    """vector_portable/channels.cu: stages of q, k, g, v, dO; rows of a warp; products of pairs; rows and columns."""
    values, size = round_up(kind.V, 16), BYTES[kind.element]
    turns, active = -(-values // 16 // warps), min(values // 16, warps)
    stages = ((2 + 2 * turns) * size + BYTES[kind.gate]) * 8 * 32 * warps
    small = warps * (3 * CHUNK * ROW + CHUNK) * 4 + active * CHUNK * CHUNK * 4 + CHUNK * ROW * 4
    return stages + small + CHUNK * (values + 8) * 4 + values * COLUMN * 4


SHARED = {"values": values_shared, "channels": channels_shared}


@functools.cache
def launch_of(name: str, kind: PortableKind, limit: int, back: bool = False) -> Launch | None:
    """A kernel, "values" or "channels"; None if a block does not fit. back: from the last chunk to the first."""
    width = kind.V if name == "values" else kind.K
    cuts = [-(-width // columns) for columns in (policy.PORTABLE_COLUMNS, policy.PORTABLE_COLUMNS // 2)]
    fitting = (n for n in cuts if SHARED[name](kind, -(-width // (16 * n))) <= limit)
    parts = next(fitting, None)
    if parts is None:
        return None
    warps = -(-width // (16 * parts))
    held = kind.K if name == "values" else kind.V  # of a row of the state
    constants = tuple(sorted({
        "LA_DTYPE": ELEMENTS[kind.element], "LA_GATE": ELEMENTS[kind.gate], "LA_K": kind.K, "LA_V": kind.V,
        "LA_ALIGN": kind.align, "LA_ERASE": int(kind.erase), "LA_BEFORE": int(kind.before),
        "LA_BONUS": int(kind.bonus), "LA_BACK": int(back), "LA_WARPS": warps, "LA_SHARED": SHARED[name](kind, warps),
        "LA_BLOCKS": 1 if held > policy.WIDEST_GROUP else 2,
        **({"LA_MARK": MARK} if name == "channels" else {}),
    }.items()))  # fmt: skip
    return Launch(Kernel(FILES[name], name, 32 * warps), constants, parts)
