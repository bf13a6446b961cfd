"""How the CUDA kernels of the backward of vector decay are cut up. Pure functions of dtype and shape."""

from __future__ import annotations

import functools

from ...runtime.cuda.elements import ELEMENTS, Constants
from .delta_plan import Kernel
from .shared_memory import BARRIER, DELTA_END, SQUARE, TILE, round_up
from .vector_plan import WIDEST, VectorKind

REVERSE = Kernel("vector/vector_reverse.cu", "reverse", 512)
GRADS = Kernel("vector/vector_grads.cu", "grads", 256)
HALF = 64  # key channels that the gradients take at a time
TABLE = 8 * HALF * 4  # bytes of a number a channel and slice of 8 tokens
STAGES = 3
EXACT_BLOCKS = 2  # blocks a multiprocessor of the build for chunks that decay too far


def _common(kind: VectorKind) -> dict[str, int]:
    return {
        "LA_DTYPE": 0, "LA_K": kind.K, "LA_V": kind.V, "LA_GATE": ELEMENTS[kind.gate], "LA_BEFORE": int(kind.before),
        "LA_BONUS": int(kind.bonus), "LA_WARPS": 8, "LA_END": DELTA_END, "LA_ENDS": DELTA_END, "LA_GRAM": SQUARE,
    }  # fmt: skip


def reverse_shared() -> int:
    """Bytes of vector_reverse.cu: stages of q, k, dO, P; tables of two chunks, G after a chunk, decays, barriers."""
    stage = 3 * TILE + SQUARE
    return STAGES * stage + 2 * 2 * TABLE + DELTA_END + STAGES * WIDEST * 4 + 3 * BARRIER * STAGES


def grads_shared(erase: bool, exact: bool) -> int:
    """Bytes of vector_grads.cu: copies, halves of S and G, dO, V (erase: dW too), Z, tables."""
    copies, tiles, spare = 2 + erase, 2 + erase, 2 * exact if erase else 1
    size = (copies + spare) * SQUARE + DELTA_END + tiles * TILE + 3 * TABLE + 2 * HALF * 4 + 2 * BARRIER
    return round_up(size, 1024) + TILE + TABLE if exact else size


@functools.cache
def reverse_constants(kind: VectorKind, adds: bool = False) -> Constants:
    """The constants of vector_reverse.cu; adds: what a segment adds to the gradient before it."""
    return tuple(sorted({**_common(kind), "LA_ADDS": int(adds), "LA_SHARED": reverse_shared()}.items()))


@functools.cache
def grads_constants(kind: VectorKind, exact: bool = False, erase: bool = False) -> Constants:
    """The constants of vector_grads.cu; exact: for chunks that decay too far for scaled copies."""
    more = {"LA_ERASE": int(erase), "LA_EXACT": int(exact), "LA_SHARED": grads_shared(erase, exact)}
    return tuple(sorted({**_common(kind), **more}.items()))


def halves(K: int) -> int:
    """Parts of the key channels that the gradients take one by one."""
    return -(-K // HALF)
