"""How the CUDA kernels of gradients token by token are cut up. Pure functions of dtype and shape."""

from __future__ import annotations

import functools
from typing import NamedTuple

from ....runtime.cuda.elements import ELEMENTS, Constants
from ....runtime.cuda.launch import Kernel
from ... import policy
from ..shared_memory import recurrence_channels, recurrence_values, round_up

VALUES = Kernel("token/values.cu", "values", 256)
CHANNELS = Kernel("token/channels.cu", "channels", 256)
MARK, COLUMNS, LANES = policy.RECURRENCE_MARK, policy.RECURRENCE_COLUMNS, policy.RECURRENCE_CHANNELS


class RecurrenceKind(NamedTuple):
    """What the kernels of a call are compiled for."""

    K: int
    V: int
    element: str
    gate: str
    erase: bool  # a free rank-one term
    before: bool = False  # queries read the previous state
    bonus: bool = False
    wide: bool = True  # rows are read four elements at a time


@functools.cache
def constants(name: str, kind: RecurrenceKind, back: bool) -> Constants:
    """The constants of a kernel, "values" or "channels"; back: from the last token to the first."""
    size = recurrence_values(kind) if name == "values" else recurrence_channels(kind)
    own = {"LA_SHARED": size, "LA_MARK": MARK} if name == "channels" else {}
    own["LA_BLOCKS"] = 3 if name == "channels" and not kind.erase else 1 if max(kind.K, kind.V) > COLUMNS else 2
    return tuple(sorted({
        "LA_DTYPE": ELEMENTS[kind.element], "LA_GATE": ELEMENTS[kind.gate], "LA_K": kind.K, "LA_V": kind.V,
        "LA_ERASE": int(kind.erase), "LA_BEFORE": int(kind.before), "LA_BONUS": int(kind.bonus),
        "LA_WIDE": int(kind.wide), "LA_BACK": int(back), **own,
    }.items()))  # fmt: skip


def kernel(name: str, kind: RecurrenceKind, back: bool) -> Kernel:
    """A kernel, with its blocks of a sequence and head."""
    if name == "values":
        built = VALUES.built(constants(name, kind, back))
        return built._replace(shared=recurrence_values(kind), parts=-(-kind.V // COLUMNS))
    return CHANNELS.built(constants(name, kind, back))._replace(parts=round_up(kind.K, LANES) // LANES)


def marks(tokens: int) -> int:
    """Marks of a sequence."""
    return -(-tokens // MARK)
