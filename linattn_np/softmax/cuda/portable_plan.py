"""Launch plans of the portable softmax kernels (products of warps). Pure functions of dtypes and shapes."""

from __future__ import annotations

import functools
from typing import NamedTuple

from ...runtime.cuda.elements import BYTES, ELEMENTS, Constants
from .. import policy
from .plan import Kernel

HEADS = 16  # rows of a block of a few tokens: so many heads at most have decays in it
KERNELS = {
    "forward": Kernel("softmax/portable_forward.cu", "portable_forward", 128),
    "pieces": Kernel("softmax/portable_forward.cu", "portable_forward", 32),  # for every 16 keys of a tile
    "cache": Kernel("softmax/cache.cu", "cache", 128),
}  # fmt: skip


class PortableKind(NamedTuple):
    """What the portable kernels are compiled for."""

    element: str  # of q, k and v
    K: int
    V: int
    gated: bool
    align: int  # bytes that every row's address and length are a multiple of
    cache: str | None = None  # its element; None without one

    @property
    def tile(self) -> str:
        """The element of tiles in shared memory."""
        return self.element if self.cache in (None, self.element) else "float32"


def threads(name: str, kind: PortableKind, limit: int) -> int:
    """Threads of a block."""
    return KERNELS[name].threads * (tile_of(name, kind, limit)[0] // 16 if name == "pieces" else 1)


@functools.cache
def constants(name: str, kind: PortableKind, limit: int) -> Constants:
    """The constants that a kernel is compiled with; limit: bytes of shared memory that a block may have."""
    made = {
        "LA_DTYPE": ELEMENTS[kind.tile], "LA_INPUT": ELEMENTS[kind.element],
        "LA_CACHE": ELEMENTS[kind.cache or kind.element], "LA_PAST": int(kind.cache is not None),
        "LA_GATED": int(kind.gated), "LA_K": kind.K, "LA_V": kind.V, "LA_ALIGN": kind.align,
        "LA_PIECE": policy.PIECE, "LA_FEW": policy.FEW_QUERIES,
    }  # fmt: skip
    if name != "cache":
        keys, stages = tile_of(name, kind, limit)
        made |= {"LA_SPLIT": int(name == "pieces"), "LA_KEYS": keys, "LA_STAGES": stages,
                 "LA_SHARED": shared_memory(name, kind, keys, stages)}  # fmt: skip
    return tuple(sorted(made.items()))


@functools.cache
def tile_of(name: str, kind: PortableKind, limit: int) -> tuple[int, int]:
    """(keys of a tile, tiles in flight)."""
    for room in (limit // 2 - 1024, limit):
        for keys, stages in policy.PORTABLE_TILES:
            if (room == limit or keys * stages >= 128) and shared_memory(name, kind, keys, stages) <= room:
                return keys, stages
    raise ValueError(f"no tile of {kind} fits in {limit} bytes")


def shared_memory(name: str, kind: PortableKind, keys: int, stages: int) -> int:
    """Bytes of shared memory of a block, as the source asserts."""
    K, V = (-(-width // 16) * 16 * BYTES[kind.tile] for width in (kind.K, kind.V))  # bytes of a row
    few = name == "pieces"
    tiles = (16 if few else 64) * K + stages * keys * (K + V + kind.gated * (HEADS if few else 1) * 16)
    return max(tiles, few * keys * (-(-kind.V // 16) * 16 + 2) * 4)
