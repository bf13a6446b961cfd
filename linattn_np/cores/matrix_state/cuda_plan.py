"""How a CUDA pass over the tokens is cut up: tiles, stages, segments. Pure functions of dtype and shape."""

from __future__ import annotations

import functools
from typing import NamedTuple

ELEMENTS = {"bfloat16": 0, "float16": 1, "float32": 2}
PRODUCTS = ELEMENTS | {"tf32": 3}  # what a pass multiplies: tf32 is float32 in memory
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "tf32": 4}
WIDEST = 256  # key and value columns
SCAN = "matrix_state/scan.cu"
MOST_STAGES = 3  # chunks in flight
CHUNK = 32  # tokens: half of a gram matrix is masked, and smaller ones leave less of it to multiply
MARKS = {"bfloat16": 256, "float16": 256, "float32": 128, "tf32": 256}  # tokens from one <S, dS> to the next
MULTIPROCESSORS = 132  # of the card that sequences are cut for
SEGMENT = 512  # tokens that a segment has at least
SMALLEST_LIMIT = 99 * 1024  # bytes of shared memory that a block can have on any device from compute capability 80 on
REGISTERS = 65536  # of a multiprocessor
BESIDE = {"bfloat16": 70, "float16": 110, "float32": 130, "tf32": 110}  # registers of a thread beside its accumulators

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


def tiles(element: str, K: int, V: int, outputs: bool, dots: bool) -> tuple[int, int]:
    """(warps, tiles of 16 value columns a warp): a warp keeps its rows of the state, K columns wide, in registers.

    Two tiles read and split keys and queries once for both. In float32 the dots leave no registers for that, nor do the
    addresses of rows that are no power of two; with fewer keys more warps fit instead.
    """
    twice = element == "bfloat16" or (element == "float32" and outputs and not dots and round_up(K, 16) == 128)
    each = 2 if twice and K <= 128 and V > 64 else 1
    return _warps(V, each), each


def _warps(V: int, each: int) -> int:
    warps = 1
    while warps < 8 // each and warps * each * 16 < V:
        warps *= 2
    return warps


@functools.cache
def scan_pass(
    element: str, K: int, V: int, align: int, decay: bool, limit: int, reverse: bool = False, outputs: bool = True,
    dots: bool = False,
) -> Pass:
    """The constants of scan.cu for keys K and values V wide, within `limit` bytes of shared memory."""
    warps, each = tiles(element, K, V, outputs, dots)
    found = _scan_pass(element, K, V, align, decay, limit, reverse, outputs, dots, warps, each)
    if element == "float32" and each == 2 and (found.resident < 2 or dict(found.constants)["LA_STAGES"] < 2):
        return _scan_pass(element, K, V, align, decay, limit, reverse, outputs, dots, _warps(V, 1), 1)
    return found


def _scan_pass(
    element: str, K: int, V: int, align: int, decay: bool, limit: int, reverse: bool, outputs: bool, dots: bool,
    warps: int, each: int,
) -> Pass:
    C, size, gram = CHUNK, BYTES[element], 2 if element == "bfloat16" else 4
    keys, values = C * round_up(K, 16) * size, C * 16 * each * warps * size
    rest = C * C * gram * outputs + warps * (4 if element == "float32" else 3) * C * 4 + dots * (warps + 1) * C * 4
    threads = 32 * warps
    registers = min(255, each * (round_up(K, 16) + C) // 2 + BESIDE[element])
    blocks = max(1, min(4, REGISTERS // (threads * registers)))
    early = element == "float32" and not dots  # outputs leave in the place of the queries
    stages, apart = _stages(keys, values, rest, limit, blocks, outputs, dots, early)
    stage = _stage(keys, values, outputs, dots, apart, early)
    shared = stages * stage + rest
    constants = {
        "LA_DTYPE": PRODUCTS[element], "LA_DECAY": int(decay), "LA_REVERSE": int(reverse), "LA_ALIGN": align,
        "LA_K": K, "LA_V": V, "LA_C": C, "LA_WARPS": warps, "LA_TILES": each, "LA_STAGES": stages,
        "LA_OUTPUTS": int(outputs), "LA_DOTS": int(dots), "LA_APART": int(apart), "LA_MARK": MARKS[element],
        "LA_SHARED": shared, "LA_BLOCKS": max(1, min(blocks, (limit + 1024) // (shared + 1024))),
    }
    parts = -(-V // (16 * each * warps))
    return Pass(SCAN, tuple(sorted(constants.items())), shared, threads, parts, C, parts, warps)


def _stage(keys: int, values: int, outputs: bool, dots: bool, apart: bool, early: bool) -> int:
    """Bytes of a stage: k, v, q (or what later has its place), x in a place of its own or in q's, log decays."""
    queries = 0 if not outputs else max(keys, values) if early or (dots and not apart) else keys
    return keys + values + queries + values * (dots and apart) + CHUNK * 4


def _stages(
    keys: int, values: int, rest: int, limit: int, blocks: int, outputs: bool, dots: bool, early: bool
) -> tuple[int, bool]:
    """(chunks in flight, whether x has a place of its own): the most with which `blocks` fit a multiprocessor."""
    for room in ((limit + 1024) // blocks - 1024, limit):
        for apart in (True, False) if dots else (False,):
            stage = _stage(keys, values, outputs, dots, apart, early)
            for n in (MOST_STAGES, 2):
                if n * stage + rest <= room:
                    return n, apart
    return 1, False


def common_constants(element: str, decay: bool, reverse: bool, chunk: int = CHUNK) -> Constants:
    """Constants of the small kernels beside a pass in chunks of `chunk` tokens."""
    return tuple(sorted({
        "LA_DTYPE": PRODUCTS[element], "LA_DECAY": int(decay), "LA_REVERSE": int(reverse),
        "LA_C": chunk, "LA_MARK": MARKS[element], "LA_TILES": 1, "LA_WARPS": 1,
    }.items()))


def segments(blocks: int, tokens: int, resident: int) -> int:
    """Pieces that sequences of `tokens` tokens are cut into when there are `blocks` blocks without cutting."""
    return max(1, min(MULTIPROCESSORS * resident // max(blocks, 1), tokens // SEGMENT))
