"""Launch plans of PaTH's kernels (cuda_src/path, compute capability 90). Pure functions of dtype and shape."""

from __future__ import annotations

import functools
from typing import NamedTuple

from ...runtime.cuda.elements import ELEMENTS, Constants
from ...runtime.cuda.launch import Kernel
from .plan import BLOCK, PANEL, SoftmaxKind

SMALLEST = 2.0**-40  # a strength in its place is as good as 0
RADIX = 8  # blocks, or groups of blocks, of a group
KERNELS = {
    "factors": Kernel("path/factors.cu", "factors", 256),
    "groups": Kernel("path/groups.cu", "groups", 384),
    "forward": Kernel("path/forward.cu", "forward", 384),
    "mapped": Kernel("path/mapped.cu", "mapped", 256),
    "queries": Kernel("path/queries.cu", "queries", 384),
    "keys": Kernel("path/keys.cu", "keys", 384),
    "diagonal": Kernel("path/diagonal.cu", "diagonal", 256),
    "map_grads": Kernel("path/map_grads.cu", "map_grads", 384),
    "groups_adjoint": Kernel("path/groups_adjoint.cu", "groups_adjoint", 256),
    "factors_adjoint": Kernel("path/factors_adjoint.cu", "factors_adjoint", 256),
}
OF_PAIRS = ("forward", "queries", "keys", "diagonal")  # with values and gates
PAIRS = BLOCK * BLOCK * 2  # bytes of X of a block
HALF = 64  # rows of a tile that another block's rows go over


class PathSizes(NamedTuple):
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

    @property
    def parts(self) -> int:
        """Bytes of the gradients of the factors of a block: of X, U, W and K."""
        return PAIRS + 3 * self.tile

    def earlier_groups(self, blocks: int) -> int:
        """Groups before the blocks of a sequence: sums of the digits of their numbers (place.cuh:EarlierGroups)."""
        top, total = self.levels - 1, 0
        for level in range(self.levels):
            one = RADIX**level
            cycles, rest = divmod(blocks, RADIX * one) if level < top else (0, blocks)
            digit, part = divmod(rest, one)
            total += one * (cycles * RADIX * (RADIX - 1) // 2 + digit * (digit - 1) // 2) + digit * part
        return total


def sizes(kind: SoftmaxKind, key_heads: int, slots: int, blocks: int) -> PathSizes:
    """The sizes of a call whose longest sequence has `blocks` blocks."""
    levels, width = 1, 2 * -(-kind.K // PANEL) * PANEL
    while RADIX**levels < blocks:
        levels += 1
    return PathSizes(key_heads, slots, levels, BLOCK * width, width // 2 * width)


@functools.cache
def constants(name: str, kind: SoftmaxKind) -> Constants:
    """The constants that a kernel is compiled with."""
    values = {"LA_DTYPE": ELEMENTS[kind.element], "LA_K": kind.K, "LA_V": kind.V, "LA_GATED": int(kind.gated)}
    if name not in OF_PAIRS:
        values |= {"LA_V": kind.K, "LA_GATED": 0}
    return tuple(sorted((values | {"LA_SHARED": shared_memory(name, kind)}).items()))


def shared_memory(name: str, kind: SoftmaxKind) -> int:
    """Bytes of shared memory of a block, as the source asserts."""
    K, V = (2 * -(-width // PANEL) * PANEL for width in (kind.K, kind.V))  # bytes of a row
    tile, gates = BLOCK * K, int(kind.gated)
    if name == "factors":
        return 2 * tile + PAIRS + BLOCK * 4 + 16
    if name == "groups":
        return 3 * tile + K // 2 * K + 3 * 16 + 16
    if name == "mapped":
        return 3 * tile + 32
    if name == "map_grads":
        return 6 * tile + 3 * 16 + 16
    if name == "groups_adjoint":
        return 7 * tile + 32
    if name == "diagonal":
        return 7 * PAIRS + gates * BLOCK * 16 + 48
    if name == "factors_adjoint":
        return 7 * PAIRS + BLOCK * 4 + 16
    half = HALF * (K + V)  # keys and values, or queries and what goes with them
    if name == "queries":
        stages = 3 * (max(half, K // 2 * K) + gates * HALF * 4)
        return 2 * tile + BLOCK * V + stages + gates * 8 * 128 * 4 + 5 * 16 + 16
    if name == "keys":
        return tile + BLOCK * V + 3 * (half + HALF * 8) + 4 * 16 + 16
    stages = 2 * max(tile, PAIRS) + 2 * BLOCK * V
    return max(tile, BLOCK * V) + tile + stages + gates * 2 * BLOCK * 16 + 2 * 2 * 16 + 16
