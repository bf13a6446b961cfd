"""How the CUDA kernels of the delta rule are cut up. Pure functions of dtype and shape."""

from __future__ import annotations

import functools
import os
from typing import NamedTuple

from ...runtime.cuda.elements import Constants
from .. import policy
from . import shared_memory

BLOCK, CHAIN, ADDS = "delta/delta_block.cu", "delta/delta_chain.cu", "delta/delta_adds.cu"
SEGMENTS = "delta/delta_segments.cu"
REVERSE, GRADS = "delta/delta_reverse.cu", "delta/delta_grads.cu"
CHUNK, WIDEST, ALIGN = 64, 128, 16  # tokens; columns of a tile; bytes that every row's address and length divide by
SEGMENT = 8  # chunks that a segment has at least
PORTABLE = os.environ.get("LINATTN_CUDA_PORTABLE", "0") not in ("", "0")
STEPS = (1, 2, 4, 8)  # of a token, with which a chunk holds whole tokens
SAVED = policy.SAVED_BLOCKS
SAVED_MIB = 1024


class Kernel(NamedTuple):
    """One entry: file, name, threads of a block."""

    file: str
    entry: str
    threads: int


KERNELS = {
    "block": Kernel(BLOCK, "block", 128), "chain": Kernel(CHAIN, "chain", 384), "adds": Kernel(ADDS, "adds", 128),
    "segments": Kernel(SEGMENTS, "segments", 256), "reverse": Kernel(REVERSE, "reverse", 384),
    "grads": Kernel(GRADS, "grads", 512),
}  # fmt: skip
MAPS = {  # the arrays whose tiles a kernel copies in or out
    "block": ("k",), "chain": ("q", "k", "v"), "adds": ("k", "v"), "segments": (), "reverse": ("q", "k", "dout"),
    "grads": ("q", "k", "v", "dout", "dv", "dq", "dk"),
}  # fmt: skip
A_TOKEN, STEPPED = ("q", "dout"), ("chain", "grads")  # what has a row a token of several steps; who stores it


def skips(steps: int, K: int = WIDEST, V: int = WIDEST) -> bool:
    """Whether the kernels read after the last of so many steps of a token alone: at the widths that were tried."""
    return steps == 1 or (steps in STEPS and K == V == WIDEST)


def takes(element: str, K: int, V: int, capability: int) -> bool:
    """Whether these kernels compute keys K and values V wide."""
    fits = element == "bfloat16" and capability == 90 and max(K, V) <= WIDEST and K % 8 == V % 8 == 0
    return fits and not PORTABLE


@functools.cache
def constants(
    name: str, K: int, V: int, decay: bool, reverse: bool = False, unit: bool = False, steps: int = 1
) -> Constants:
    """The constants of a kernel for keys K and values V wide.

    reverse: segments.cu from the last one down. unit: q and k are divided by their length. steps: of a token.
    """
    more = {"LA_UNIT": 1} if unit and name != "segments" else {}
    if steps > 1 and name not in ("adds", "segments"):
        more["LA_STEPS"] = steps
    return tuple(sorted({
        "LA_DTYPE": 0, "LA_DECAY": int(decay), "LA_REVERSE": int(reverse), "LA_ALIGN": ALIGN, "LA_K": K, "LA_V": V,
        "LA_C": CHUNK, "LA_WARPS": 8, "LA_TILES": 1, "LA_SHARED": shared_memory.delta(name, unit),
        "LA_STATE": shared_memory.DELTA_STATE, "LA_ENDS": shared_memory.DELTA_ENDS,
        "LA_CHECKPOINT": shared_memory.delta_checkpoint(unit and name != "segments"),
        **more,
    }.items()))


def names(segments: int, gradients: bool) -> list[tuple[str, bool]]:
    """(kernel, reverse) of everything that a call and its backward launch."""
    found = [("block", False), ("chain", False)]
    if segments > 1:
        found += [("adds", False), ("segments", False)]
    if gradients:
        found += [("reverse", False), ("grads", False)] + [("segments", True)] * (segments > 1)
    return found


def segments(slots: int, chunks: int, multiprocessors: int) -> int:
    """Pieces that sequences of `chunks` chunks are cut into; a block of the chain has a multiprocessor to itself.

    One or two less where all blocks that sum the segments up are then there at once, three a multiprocessor.
    """
    n = max(1, min(multiprocessors // max(slots, 1), chunks // SEGMENT))
    together = (3 * multiprocessors // slots + 6) // 4  # two blocks a sum, two a matrix but for the first
    return together if 7 * n <= 8 * together < 8 * n else n


def saves_blocks(size: int) -> bool:
    """Whether a forward keeps `size` bytes of blocks for its backward, which else makes them again."""
    return size <= int(os.environ.get(SAVED) or SAVED_MIB) << 20
