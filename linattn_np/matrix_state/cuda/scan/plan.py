"""Launch plans of the portable scan: tiles, stages, segments. Pure functions of dtype and shape."""

from __future__ import annotations

import functools
from typing import NamedTuple

from ....runtime.cuda.elements import ELEMENTS, Constants
from ....runtime.cuda.launch import Kernel
from ... import policy
from .. import shared_memory
from ..shared_memory import round_up

PRODUCTS = ELEMENTS | {"tf32": 3}  # element types of products: tf32 is float32 in memory
SCAN = "scan/scan.cu"


def constant(kernel: Kernel, name: str) -> int:
    """A constant that a pass is compiled for; LA_BLOCKS is the number of resident blocks of a multiprocessor."""
    return dict(kernel.constants)[name]


def all_warps(kernel: Kernel) -> int:
    """Warps of a sequence and head, in all blocks."""
    return kernel.parts * constant(kernel, "LA_WARPS")


def dot_parts(kernel: Kernel) -> int:
    """Partial sums of a dot product of two tokens: of blocks over the value columns, or of warpgroups."""
    return kernel.parts if kernel.file == SCAN else all_warps(kernel) // 4


def mark_floats(kernel: Kernel) -> int:
    """Floats of a checkpointed state, all parts."""
    return all_warps(kernel) * constant(kernel, "LA_MARK_BYTES") // 4


def tiles(element: str, K: int, V: int, outputs: bool, dots: bool) -> tuple[int, int]:
    """(warps, tiles of 16 value columns per warp): a warp holds its rows of the state, K columns wide, in registers.

    With two tiles, keys and queries are loaded and split once for both. In float32 the dot products leave no registers
    for two, nor do row addresses at widths other than a power of two; with narrower keys more warps fit instead.
    """
    twice = element == "bfloat16" or (element == "float32" and outputs and not dots and round_up(K, 16) == 128)
    each = 2 if twice and K <= 128 and V > 64 else 1
    return _warps(V, each), each


def _warps(V: int, each: int) -> int:
    warps = 1
    while warps < 8 // each and warps * each * 16 < V:
        warps *= 2
    return warps


class ScanKind(NamedTuple):
    """What a pass of scan.cu is compiled for."""

    element: str
    K: int
    V: int
    align: int  # largest power of two that divides every row's address and length, in bytes
    decay: bool
    reverse: bool = False
    outputs: bool = True
    dots: bool = False


@functools.cache
def scan_pass(kind: ScanKind, limit: int) -> Kernel:
    """The constants of scan.cu within `limit` bytes of shared memory."""
    warps, each = tiles(kind.element, kind.K, kind.V, kind.outputs, kind.dots)
    how = _scan_pass(kind, limit, warps, each)
    if kind.element == "float32" and each == 2 and (constant(how, "LA_BLOCKS") < 2 or constant(how, "LA_STAGES") < 2):
        return _scan_pass(kind, limit, _warps(kind.V, 1), 1)
    return how


def _scan_pass(kind: ScanKind, limit: int, warps: int, each: int) -> Kernel:
    element, outputs, dots = kind.element, kind.outputs, kind.dots
    C, threads = policy.SCAN_CHUNK, 32 * warps
    registers = min(255, each * (round_up(kind.K, 16) + C) // 2 + policy.SCAN_REGISTERS[element])
    blocks = max(1, min(4, policy.REGISTERS // (threads * registers)))
    stages, separate = _stages(kind, warps, warps * each, limit, blocks)
    shared = shared_memory.scan(kind, warps, warps * each, stages, separate)
    constants = {
        "LA_DTYPE": PRODUCTS[element], "LA_DECAY": int(kind.decay), "LA_REVERSE": int(kind.reverse),
        "LA_ALIGN": kind.align, "LA_K": kind.K, "LA_V": kind.V, "LA_C": C, "LA_WARPS": warps, "LA_TILES": each,
        "LA_STAGES": stages, "LA_OUTPUTS": int(outputs), "LA_DOTS": int(dots), "LA_SEPARATE_X": int(separate),
        "LA_MARK": policy.MARK_TOKENS[element], "LA_MARK_BYTES": shared_memory.mark_bytes(kind.K, each, False),
        "LA_SHARED": shared, "LA_BLOCKS": max(1, min(blocks, (limit + 1024) // (shared + 1024))),
    }  # fmt: skip
    parts = -(-kind.V // (16 * each * warps))
    return Kernel(SCAN, "scan", threads, tuple(sorted(constants.items())), shared, parts)


def _stages(kind: ScanKind, warps: int, tiles: int, limit: int, blocks: int) -> tuple[int, bool]:
    """(chunks in flight, whether x has a separate buffer): the most with which `blocks` fit a multiprocessor."""
    for most in ((limit + 1024) // blocks - 1024, limit):
        for separate in (True, False) if kind.dots else (False,):
            for n in (policy.SCAN_STAGES, 2):
                if shared_memory.scan(kind, warps, tiles, n, separate) <= most:
                    return n, separate
    return 1, False


def chunk_of(by_groups: bool) -> int:
    """Tokens of a chunk of the passes, with warpgroup products or without."""
    return policy.GROUP_CHUNK if by_groups else policy.SCAN_CHUNK


def common_constants(element: str, decay: bool, reverse: bool, chunk: int = policy.SCAN_CHUNK) -> Constants:
    """Constants of the small kernels that complete a pass in chunks of `chunk` tokens."""
    return tuple(
        sorted(
            {
                "LA_DTYPE": PRODUCTS[element],
                "LA_DECAY": int(decay),
                "LA_REVERSE": int(reverse),
                "LA_C": chunk,
                "LA_MARK": policy.MARK_TOKENS[element],
                "LA_TILES": 1,
                "LA_WARPS": 1,
            }.items()
        )
    )


def segments(blocks: int, tokens: int, resident: int, multiprocessors: int) -> int:
    """Number of segments of a sequence of `tokens` tokens, if there are `blocks` blocks without segments."""
    return max(1, min(multiprocessors * resident // max(blocks, 1), tokens // policy.SEGMENT_TOKENS))
