"""How the CUDA kernels of erase FREE are cut up. Pure functions of dtype and shape."""

from __future__ import annotations

import functools
from typing import NamedTuple

from ....runtime.cuda.elements import ELEMENTS, Constants
from ... import policy
from ..delta_plan import Kernel
from ..shared_memory import PANEL, SQUARE, round_up
from ..vector_plan import ALIGN, CHUNK, WIDEST

FACTORS, CHAIN = "factors", "chain"
KERNELS = {
    FACTORS: Kernel("vector_free/free_factors.cu", "factors", 256),
    CHAIN: Kernel("vector_free/free_chain.cu", "chain", 384),
}
_DIAGONAL, _INVERSE = 16 * 20 * 4, 2 * 16 * 16 * 2  # bytes of a diagonal block, and of its inverse in two terms


class FreeKind(NamedTuple):
    """What the kernels of a call are compiled for."""

    K: int
    V: int
    gate: str  # dtype of the log decays: bfloat16 or float32
    ragged: bool = False


class Build(NamedTuple):
    """Which build of a kernel: of what was flagged; from the last chunk; with states stored; with positions."""

    exact: bool = False
    backward: bool = False
    keep: bool = False
    at: bool = False


def tile(width: int) -> int:
    """Bytes of a chunk's rows in shared memory."""
    return CHUNK * round_up(width, PANEL) * 2


def factor_bytes(K: int) -> int:
    """Bytes of a chunk's factors: four tiles of rows, one of pairs, the decay of the chunk."""
    return 4 * tile(K) + SQUARE + round_up(K, PANEL) * 4


def state_bytes(K: int, V: int) -> int:
    """Bytes of a state in bfloat16."""
    return round_up(K, PANEL) * round_up(V, PANEL) * 2


def shared(name: str, K: int, V: int, exact: bool = False) -> int:
    """Bytes of shared memory of a block.

    factors: four tiles, four squares, decays of blocks and chunk, diagonal blocks; exact: four tiles more. chain: two
    stages of factors, three of values.
    """
    if name == CHAIN:
        return 2 * round_up(factor_bytes(K), 1024) + 3 * tile(V) + 128
    small = 5 * WIDEST * 4 + 4 * (_DIAGONAL + _INVERSE) + 64
    return round_up(4 * tile(K) + 4 * SQUARE + small, 1024) + exact * 4 * tile(K)


@functools.cache
def constants(name: str, kind: FreeKind, build: Build = Build()) -> Constants:  # noqa: B008, a tuple
    """The constants of a kernel."""
    size = shared(name, kind.K, kind.V, build.exact)
    own = {"LA_EXACT": build.exact, "LA_PIECES": policy.EXACT_PIECES}
    if name == CHAIN:
        own = {"LA_BACKWARD": build.backward, "LA_KEEP": build.keep}
        own |= {"LA_AT": True} if build.at else {}
    return tuple(sorted({
        "LA_DTYPE": 0, "LA_DECAY": 2, "LA_REVERSE": 0, "LA_GATE": ELEMENTS[kind.gate], "LA_ALIGN": ALIGN * 2,
        "LA_K": kind.K, "LA_V": kind.V, "LA_C": CHUNK, "LA_WARPS": 4 * groups(kind.V), "LA_TILES": 1,
        "LA_SHARED": size, "LA_BLOCKS": min(2 - build.exact, (policy.GROUP_SHARED + 1024) // (size + 1024)),
        "LA_FACTORS": factor_bytes(kind.K), "LA_RAGGED": int(kind.ragged), **{n: int(y) for n, y in own.items()},
    }.items()))  # fmt: skip


def groups(V: int) -> int:
    """Warpgroups of 64 value columns."""
    return round_up(V, PANEL) // PANEL


def threads(name: str, V: int) -> int:
    """Of a block."""
    return 128 * (groups(V) + 1) if name == CHAIN else KERNELS[name].threads
