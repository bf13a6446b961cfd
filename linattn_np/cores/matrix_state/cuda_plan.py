"""How a CUDA pass over the tokens is cut up: tiles, stages, segments. Pure functions of dtype and shape."""

from __future__ import annotations

import functools
from typing import NamedTuple

ELEMENTS = {"bfloat16": 0, "float16": 1, "float32": 2}
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
WIDEST = 256  # key and value columns
SCAN = "matrix_state/scan.cu"
MARK = 4  # chunks between two inner products of states for the gradient of the gates
MULTIPROCESSORS = 132  # of the card that sequences are cut for
SEGMENT = 8  # chunks that a segment has at least
SMALLEST_LIMIT = 99 * 1024  # bytes of shared memory that a block can have on any device from compute capability 86 on
REGISTERS = 65536  # of a multiprocessor

Constants = tuple[tuple[str, int], ...]


class Pass(NamedTuple):
    """One compiled pass: its source and constants, and what a launch needs to know of them."""

    file: str
    constants: Constants
    shared: int  # bytes
    threads: int
    parts: int  # blocks over the value columns
    chunk: int  # tokens
    dot_parts: int  # sums that a dot of two tokens comes in
    warps: int  # of each such sum

    @property
    def resident(self) -> int:
        """Blocks of a multiprocessor."""
        return dict(self.constants)["LA_BLOCKS"]

    @property
    def mark_floats(self) -> int:
        """Room of a state in registers, all parts: float32, or bfloat16 padded to whole panels of 64 columns."""
        values = dict(self.constants)
        rows = self.dot_parts * self.warps * values["LA_TILES"] * 16
        return rows * (round_up(values["LA_K"], 16) if self.file == SCAN else round_up(values["LA_K"], 64) // 2)


def round_up(n: int, to: int) -> int:
    return -(-n // to) * to


def chunk_length(element: str) -> int:
    """C: shared memory holds 64 tokens of 16-bit elements, 32 of float32."""
    return 32 if element == "float32" else 64


def tiles(element: str, K: int, V: int) -> tuple[int, int]:
    """(warps, tiles of 16 value columns a warp): a warp keeps its rows of the state, K columns wide, in registers."""
    each = 2 if element == "bfloat16" and K <= 128 and V > 64 else 1
    warps = 1
    while warps < 8 // each and warps * each * 16 < V:
        warps *= 2
    return warps, each


@functools.cache
def scan_pass(
    element: str, K: int, V: int, align: int, decay: bool, limit: int, reverse: bool = False, outputs: bool = True,
    dots: bool = False,
) -> Pass:
    """The constants of scan.cu for keys K and values V wide, within `limit` bytes of shared memory."""
    (warps, each), C = tiles(element, K, V), chunk_length(element)
    size, gram = BYTES[element], 2 if element == "bfloat16" else 4
    keys, values = C * round_up(K, 16) * size, C * 16 * each * warps * size
    queries = 0 if not outputs else max(keys, values) if dots else keys
    stage = keys + values + queries + C * 4
    rest = C * C * gram * outputs + warps * (4 if element == "float32" else 3) * C * 4 + dots * (warps + 1) * C * 4
    stages = next((n for n in (3, 2) if (n == 2 or not outputs) and n * stage + rest <= limit), 1)
    shared, threads = stages * stage + rest, 32 * warps
    registers = min(255, each * (round_up(K, 16) + C) // 2 + (70 if element == "bfloat16" else 110))
    constants = {
        "LA_DTYPE": ELEMENTS[element], "LA_DECAY": int(decay), "LA_REVERSE": int(reverse), "LA_ALIGN": align,
        "LA_K": K, "LA_V": V, "LA_C": C, "LA_WARPS": warps, "LA_TILES": each, "LA_STAGES": stages,
        "LA_OUTPUTS": int(outputs), "LA_DOTS": int(dots), "LA_MARK": MARK, "LA_SHARED": shared,
        "LA_BLOCKS": max(1, min(4, 227 * 1024 // (shared + 1024), REGISTERS // (threads * registers))),
    }
    parts = -(-V // (16 * each * warps))
    return Pass(SCAN, tuple(sorted(constants.items())), shared, threads, parts, C, parts, warps)


def shared_needed(element: str, K: int, V: int, limit: int) -> int:
    """Bytes of shared memory that the largest pass of forward and backward takes at the least."""
    widths = ((K, V), (V, K))
    return max(scan_pass(element, *w, BYTES[element], True, limit, dots=True).shared for w in widths)


def common_constants(element: str, decay: bool, reverse: bool) -> Constants:
    """Constants of the small kernels beside a pass."""
    return tuple(sorted({
        "LA_DTYPE": ELEMENTS[element], "LA_DECAY": int(decay), "LA_REVERSE": int(reverse),
        "LA_C": chunk_length(element), "LA_MARK": MARK, "LA_TILES": 1, "LA_WARPS": 1,
    }.items()))


def segments(blocks: int, chunks: int, resident: int) -> int:
    """Pieces that sequences of `chunks` chunks are cut into when there are `blocks` blocks without cutting."""
    return max(1, min(MULTIPROCESSORS * resident // max(blocks, 1), chunks // SEGMENT))
