"""Launch plans of the portable softmax kernels (products of warps). Pure functions of dtypes and shapes."""

from __future__ import annotations

import functools
from typing import NamedTuple

from ...runtime.cuda.elements import BYTES, ELEMENTS, Constants
from ...runtime.cuda.launch import Kernel
from .. import policy

KERNELS = {
    "forward": Kernel("softmax_portable/forward.cu", "portable_forward", 32),  # for every 16 rows of a block
    "pieces": Kernel("softmax_portable/forward.cu", "portable_forward", 32),  # for every 16 keys of a tile
    "cache": Kernel("softmax_portable/cache.cu", "cache", 128),
    "queries": Kernel("softmax_portable/queries.cu", "portable_queries", 32),
    "keys": Kernel("softmax_portable/keys.cu", "portable_keys", 32),
}  # fmt: skip


class PortableKind(NamedTuple):
    """What the portable kernels are compiled for."""

    element: str  # of q, k and v
    K: int
    V: int
    gated: bool
    align: int  # bytes that every row's address and length are a multiple of
    cache: str | None = None  # its element; None without one
    heads: int = 1  # whose decays a block of a few tokens needs, at most; a power of two

    @property
    def tile(self) -> str:
        """The element of tiles in shared memory."""
        return self.element if self.cache in (None, self.element) else "float32"


BACKWARD = ("queries", "keys")


def threads(name: str, kind: PortableKind, limit: int) -> int:
    """Threads of a block."""
    warps = 1 if name == "cache" else block_of(name, kind, limit)[name == "pieces"] // 16
    return KERNELS[name].threads * warps


@functools.cache
def constants(name: str, kind: PortableKind, limit: int, done: int = 0) -> Constants:
    """The constants that a kernel is compiled with; limit: bytes of shared memory that a block may have.

    done: the results of a launch of `keys`, 1 dv, 2 dk, 3 both.
    """
    values = {
        "LA_DTYPE": ELEMENTS[kind.tile], "LA_INPUT": ELEMENTS[kind.element],
        "LA_CACHE": ELEMENTS[kind.cache or kind.element], "LA_PAST": int(kind.cache is not None),
        "LA_GATED": int(kind.gated), "LA_K": kind.K, "LA_V": kind.V, "LA_ALIGN": kind.align,
        "LA_FEW": policy.FEW_QUERIES,
    }  # fmt: skip
    if name != "cache":
        block = block_of(name, kind, limit)
        values |= {"LA_KEYS": block[1], "LA_SHARED": shared_memory(name, kind, *block)}
        values["LA_ROWS"] = block[0]
        ahead = {"LA_STAGES": block[2], "LA_SPLIT": int(name == "pieces"),
                 "LA_HEADS": kind.heads if name == "pieces" else 1}  # fmt: skip
        values |= {} if name in BACKWARD else ahead
        values |= {"LA_PASS": done} if name == "keys" else {}
    return tuple(sorted(values.items()))


def passes(kind: PortableKind, strict: bool = False) -> tuple[int, ...]:
    """What each launch of `keys` computes: dk and dv of wide heads are too many registers for one; of a system dk."""
    if strict:
        return (2,)
    return (3,) if kind.K + kind.V <= policy.WIDEST_CUDA * 2 else (1, 2)


@functools.cache
def block_of(name: str, kind: PortableKind, limit: int) -> tuple[int, int, int]:
    """(rows of a block, rows of a tile that it goes over, tiles in flight)."""
    blocks = [(16 if name == "pieces" else 64, *tile) for tile in policy.PORTABLE_TILES] + [(32, 16, 2)]
    if name in BACKWARD:
        blocks = [(*block, 2) for block in policy.PORTABLE_BLOCKS]
    ahead = {"pieces": 128, "forward": 64}.get(name, 0)  # least keys in flight of each of two blocks
    for most in (limit // 2 - 1024, limit):
        for rows, keys, stages in blocks:
            if shared_memory(name, kind, rows, keys, stages) <= most and (most == limit or keys * stages >= ahead):
                return rows, keys, stages
    raise ValueError(f"no block of {kind} fits in {limit} bytes")


def shared_memory(name: str, kind: PortableKind, rows: int, keys: int, stages: int) -> int:
    """Bytes of shared memory of a block, as the source asserts."""
    K, V = (-(-width // 16) * 16 * BYTES[kind.tile] for width in (kind.K, kind.V))  # bytes of a row
    if name in BACKWARD:
        numbers = {"queries": 2 * rows // 16 * 4, "keys": stages * keys * 8}[name]
        return rows * (K + V) + stages * keys * (K + V + kind.gated * 16) + numbers
    few = name == "pieces"
    tiles = rows * K + stages * keys * (K + V + kind.gated * (kind.heads if few else 1) * 16)
    return max(tiles, few * keys * (-(-kind.V // 16) * 16 + 2) * 4)
