"""How the CUDA kernels of a vector decay are cut up. Pure functions of dtype and shape."""

from __future__ import annotations

import functools
import os
from typing import NamedTuple

from ...runtime.cuda.elements import ELEMENTS, Constants
from . import shared_memory
from .delta_plan import Kernel

CHUNK, WIDEST = 64, 128  # tokens; columns of a tile
ALIGN = 8  # columns: rows of whole 16 bytes
SEGMENT = 8  # chunks that a segment has at least
STATE = shared_memory.DELTA_STATE
PIECES = 4  # blocks of a head that redo what needs the exact path
MOST = {"adds": 2, "inverse": 4, "transfers": 3}  # blocks of a multiprocessor, where there is memory for them
PORTABLE = os.environ.get("LINATTN_CUDA_PORTABLE", "0") not in ("", "0")

KERNELS = {
    "scan": Kernel("vector/vector_scan.cu", "scan", 512), "adds": Kernel("vector/vector_adds.cu", "adds", 256),
    "segments": Kernel("vector/vector_segments.cu", "segments", 256),
    "segments in reverse": Kernel("vector/vector_segments.cu", "segments", 256),
    "inverse": Kernel("vector/vector_inverse.cu", "inverse", 256),
    "chain": Kernel("vector/vector_chain.cu", "chain", 512),
    "transfers": Kernel("vector/vector_transfers.cu", "transfers", 128),
}  # fmt: skip


class VectorKind(NamedTuple):
    """What the kernels of a call are compiled for."""

    K: int
    V: int
    gate: str  # dtype of the log decays: bfloat16 or float32
    before: bool = False  # queries read the previous state
    bonus: bool = False
    ragged: bool = False


def takes(element: str, K: int, V: int, capability: int) -> bool:
    """Whether these kernels compute keys K and values V wide."""
    fits = element == "bfloat16" and capability == 90 and max(K, V) <= WIDEST and K % ALIGN == V % ALIGN == 0
    return fits and not PORTABLE


@functools.cache
def constants(name: str, kind: VectorKind, exact: bool = False, keep: bool = False) -> Constants:
    """The constants of a kernel. exact: of what was flagged; keep: residuals, or an inverse's factors, are stored."""
    shared = shared_memory.vector(name, kind.gate)
    own: dict[str, int] = {}
    if name in ("scan", "chain", "inverse"):
        own = {"LA_EXACT": exact}
    if name in ("scan", "chain"):
        own |= {"LA_RAGGED": kind.ragged}
    if name == "scan":
        own |= {"LA_KEEP": keep, "LA_BEFORE": kind.before, "LA_BONUS": kind.bonus}
    if name == "inverse":
        own |= {"LA_PIECES": PIECES, "LA_FACTORS": keep}
    return tuple(sorted({
        "LA_DTYPE": 0, "LA_DECAY": 2, "LA_REVERSE": int(name == "segments in reverse"),
        "LA_GATE": ELEMENTS[kind.gate], "LA_ALIGN": 16, "LA_K": kind.K, "LA_V": kind.V, "LA_C": CHUNK,
        "LA_WARPS": 8, "LA_TILES": 1,
        "LA_STAGES": shared_memory.vector_stages(name, kind.gate), "LA_SHARED": shared,
        "LA_BLOCKS": min(MOST.get(name, 1), 228 * 1024 // (shared + 1024)),
        **{n: int(value) for n, value in own.items()},
    }.items()))


def segments(slots: int, chunks: int, multiprocessors: int) -> int:
    """Pieces that sequences of `chunks` chunks are cut into; a block of the scan has a multiprocessor to itself."""
    return max(1, min(multiprocessors // max(slots, 1), chunks // SEGMENT))
