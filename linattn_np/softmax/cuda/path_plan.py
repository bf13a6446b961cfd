"""Launch plans of PaTH's kernels (cuda_src/path, compute capability 90). Pure functions of dtype and shape."""

from __future__ import annotations

import functools
from typing import NamedTuple

from ...runtime.cuda.elements import ELEMENTS, Constants
from .plan import BLOCK, PANEL, Kernel, Kind

RADIX = 8  # blocks, or groups of blocks, of a group
KERNELS = {
    "factors": Kernel("path/factors.cu", "factors", 256),
    "groups": Kernel("path/groups.cu", "groups", 384),
    "forward": Kernel("path/forward.cu", "forward", 384),
}
PAIRS = BLOCK * BLOCK * 2  # bytes of X of a block


class Sizes(NamedTuple):
    """What is stored of the position maps of a call."""

    key_heads: int
    slots: int  # blocks of a head of all sequences, rounded up for each of a ragged batch
    levels: int  # sizes of groups, single blocks included
    tile: int  # bytes of a block's rows of K columns
    map: int  # bytes of D

    @property
    def factors(self) -> int:
        """Bytes of X and U of all blocks."""
        return self.key_heads * self.slots * (PAIRS + self.tile)

    @property
    def keys(self) -> int:
        """Bytes of the keys at the ends of their blocks and groups."""
        return self.levels * self.key_heads * self.slots * self.tile

    @property
    def maps(self) -> int:
        """Bytes of D of all blocks and groups."""
        return sum(self.key_heads * (self.slots // RADIX**level) * self.map for level in range(self.levels))


def sizes(kind: Kind, key_heads: int, slots: int, blocks: int) -> Sizes:
    """The sizes of a call whose longest sequence has so many blocks."""
    levels, width = 1, 2 * -(-kind.K // PANEL) * PANEL
    while RADIX**levels < blocks:
        levels += 1
    return Sizes(key_heads, slots, levels, BLOCK * width, width // 2 * width)


@functools.cache
def constants(name: str, kind: Kind) -> Constants:
    """The constants that a kernel is compiled with."""
    made = {"LA_DTYPE": ELEMENTS[kind.element], "LA_K": kind.K, "LA_V": kind.V, "LA_GATED": int(kind.gated)}
    if name != "forward":  # neither values nor gates
        made |= {"LA_V": kind.K, "LA_GATED": 0}
    return tuple(sorted((made | {"LA_SHARED": shared_memory(name, kind)}).items()))


def shared_memory(name: str, kind: Kind) -> int:
    """Bytes of shared memory of a block, as the source asserts."""
    K, V = (2 * -(-width // PANEL) * PANEL for width in (kind.K, kind.V))  # bytes of a row
    if name == "factors":
        return 2 * BLOCK * K + PAIRS + BLOCK * 4 + 16
    if name == "groups":
        return 3 * BLOCK * K + K // 2 * K + 3 * 16 + 16
    stages = 2 * max(BLOCK * K, PAIRS) + 2 * BLOCK * V
    return BLOCK * max(K, V) + BLOCK * K + stages + kind.gated * 2 * BLOCK * 16 + 2 * 2 * 16 + 16
