"""How the CUDA kernels of the delta rule are cut up. Pure functions of dtype and shape."""

from __future__ import annotations

import functools
import os
from typing import NamedTuple

from . import cuda_plan

BLOCK, CHAIN, ADDS = "matrix_state/delta_block.cu", "matrix_state/delta_chain.cu", "matrix_state/delta_adds.cu"
SEGMENTS = "matrix_state/delta_segments.cu"
REVERSE, GRADS = "matrix_state/delta_reverse.cu", "matrix_state/delta_grads.cu"
CHUNK, WIDEST, ALIGN = 64, 128, 16  # tokens; columns of a tile; bytes that every row's address and length divide by
TILE, SQUARE, TOKEN = 64 * 128 * 2, 64 * 64 * 2, 64 * 4  # bytes of 128 columns, of 64, of a number a token
KEPT = SQUARE + 4 * TOKEN  # bytes that are kept of a chunk: A, e, d, c, beta
LENGTHS = 2 * TOKEN  # and where q and k are divided by their length: that, inverted, of k and of q
END = 128 * 128 * 2  # bytes of a chunk's state in bfloat16
ENDS = END + 8 * TOKEN  # and of its gradient, with dW.v over 16 value columns each behind it
SEGMENT = 8  # chunks that a segment has at least
STATE = 128 * 128  # floats of a segment's state
PORTABLE = os.environ.get("LINATTN_CUDA_PORTABLE", "0") not in ("", "0")
STEPS = (1, 2, 4, 8)  # of a token, with which a chunk holds whole tokens
SAVED = "LINATTN_CUDA_SAVED_BLOCKS"  # in the environment: most MiB of kept blocks that a forward saves for its backward
SAVED_MIB = 1024


class Kernel(NamedTuple):
    """One entry: file, name, threads and bytes of shared memory of a block."""

    file: str
    entry: str
    threads: int
    shared: int


STAGE = 3 * TILE + 2 * SQUARE + 1024
KERNELS = {
    "block": Kernel(BLOCK, "block", 128, SQUARE + KEPT + 2 * TOKEN + 32),
    "chain": Kernel(CHAIN, "chain", 384, 3 * STAGE + 128),
    "adds": Kernel(ADDS, "adds", 128, 2 * (TILE + 2 * SQUARE + 1024) + 64),
    "segments": Kernel(SEGMENTS, "segments", 256, 2 * 128 * 136 * 4 + 128 * 20 * 8),
    "reverse": Kernel(REVERSE, "reverse", 384, 3 * STAGE + END),
    "grads": Kernel(GRADS, "grads", 512, 8 * TILE + 2 * END + 2 * SQUARE + 2 * KEPT + (3 * 64 + 16) * 4 + 96),
}
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
) -> cuda_plan.Constants:
    """The constants of a kernel for keys K and values V wide.

    reverse: segments.cu from the last one down. unit: q and k are divided by their length. steps: of a token.
    """
    more = {"LA_UNIT": 1} if unit and name != "segments" else {}
    if steps > 1 and name not in ("adds", "segments"):
        more["LA_STEPS"] = steps
    return tuple(sorted({
        "LA_DTYPE": 0, "LA_DECAY": int(decay), "LA_REVERSE": int(reverse), "LA_ALIGN": ALIGN, "LA_K": K, "LA_V": V,
        "LA_C": CHUNK, "LA_WARPS": 8, "LA_TILES": 1, "LA_SHARED": shared(name, unit), **more,
    }.items()))


def shared(name: str, unit: bool) -> int:
    """Bytes of shared memory of a block."""
    return KERNELS[name].shared + LENGTHS * (unit and name == "block")


def names(segments: int, gradients: bool) -> list[tuple[str, bool]]:
    """(kernel, reverse) of everything that a call and its backward launch."""
    found = [("block", False), ("chain", False)]
    if segments > 1:
        found += [("adds", False), ("segments", False)]
    if gradients:
        found += [("reverse", False), ("grads", False)] + [("segments", True)] * (segments > 1)
    return found


def segments(slots: int, chunks: int) -> int:
    """Pieces that sequences of `chunks` chunks are cut into; a block of the chain has a multiprocessor to itself.

    One or two less where all blocks that sum the segments up are then there at once, three a multiprocessor.
    """
    n = max(1, min(cuda_plan.MULTIPROCESSORS // max(slots, 1), chunks // SEGMENT))
    together = (3 * cuda_plan.MULTIPROCESSORS // slots + 6) // 4  # two blocks a sum, two a matrix but for the first
    return together if 7 * n <= 8 * together < 8 * n else n


def saves_blocks(size: int) -> bool:
    """Whether a forward keeps `size` bytes of blocks for its backward, which else makes them again."""
    return size <= int(os.environ.get(SAVED) or SAVED_MIB) << 20
