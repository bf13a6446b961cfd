"""How the portable CUDA kernels of a vector decay are cut up. Pure functions of dtype and shape."""

from __future__ import annotations

import functools
from typing import NamedTuple

from ....runtime.cuda.elements import ELEMENTS, Constants
from ....runtime.cuda.launch import Kernel
from ... import policy
from ..shared_memory import portable_channels, portable_values

FILES = {"values": "portable/values.cu", "channels": "portable/channels.cu"}
BONUS = Kernel("portable/bonus.cu", "bonus", 256)
CHUNK, MARK, BONUS_TOKENS = policy.PORTABLE_CHUNK, policy.RECURRENCE_MARK, 64


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
    long: bool = False  # exact sums over many chunks
    columns: bool = False  # decays of the value channels too


SHARED = {"values": portable_values, "channels": portable_channels}


@functools.cache
def launch_of(name: str, kind: PortableKind, limit: int, back: bool = False) -> Kernel | None:
    """A kernel, "values" or "channels"; None if a block does not fit. back: from the last chunk to the first."""
    width = kind.V if name == "values" else kind.K
    cuts = [-(-width // columns) for columns in (policy.PORTABLE_COLUMNS >> n for n in range(3))]
    fitting = (n for n in cuts if SHARED[name](kind, -(-width // (16 * n)), back) <= limit)
    parts = next(fitting, None)
    if parts is None:
        return None
    warps = -(-width // (16 * parts))
    held = kind.K if name == "values" else kind.V  # of a row of the state
    shared = SHARED[name](kind, warps, back)
    two = held <= policy.WIDEST_GROUP and (not kind.erase or name == "values" or 2 * shared < policy.GROUP_SHARED)
    constants = tuple(sorted({
        **_sizes(kind), "LA_ERASE": int(kind.erase), "LA_BEFORE": int(kind.before),
        "LA_BONUS": int(kind.bonus), "LA_BACK": int(back), "LA_LONG": int(kind.long), "LA_WARPS": warps,
        "LA_SHARED": shared, "LA_BLOCKS": 2 if two else 1,
        **({"LA_MARK": MARK} if name == "channels" or kind.columns else {}),
        **({"LA_COLUMNS": 1} if kind.columns else {}),
    }.items()))  # fmt: skip
    return Kernel(FILES[name], name, 32 * warps, constants, shared, parts)


def _sizes(kind: PortableKind) -> dict[str, int]:
    return {"LA_DTYPE": ELEMENTS[kind.element], "LA_GATE": ELEMENTS[kind.gate], "LA_K": kind.K, "LA_V": kind.V,
            "LA_ALIGN": kind.align}  # fmt: skip


def bonus_constants(kind: PortableKind) -> Constants:
    """Of the kernel that adds what the bonus has in the gradients."""
    more = {"LA_WARPS": BONUS.threads // 32, "LA_TOKENS": BONUS_TOKENS}
    return tuple(sorted((_sizes(kind) | more).items()))
