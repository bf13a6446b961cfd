"""How the CUDA kernels of the backward of vector decay are cut up. Pure functions of dtype and shape."""

from __future__ import annotations

import functools

from ...runtime.cuda.elements import ELEMENTS, Constants
from .delta_plan import Kernel
from .shared_memory import BARRIER, DELTA_END, DELTA_ENDS, SQUARE, TILE, TOKEN, round_up
from .vector_plan import WIDEST, VectorKind

REVERSE = Kernel("vector_backward/vector_reverse.cu", "reverse", 512)
GRADS = Kernel("vector_backward/vector_grads.cu", "grads", 256)
STRENGTHS = Kernel("vector_backward/vector_strengths.cu", "strengths", 256)
BONUS = Kernel("vector_backward/vector_bonus.cu", "bonus", 256)
CHANNELS = 32  # of a block of vector_bonus.cu
HALF = 64  # key channels that the gradients take at a time
TABLE = 8 * HALF * 4  # bytes of a number a channel and slice of 8 tokens
EXACT_BLOCKS = 2  # blocks a multiprocessor of the build for chunks that decay too far


def _common(kind: VectorKind, erase: bool) -> dict[str, int]:
    return {
        "LA_DTYPE": 0, "LA_K": kind.K, "LA_V": kind.V, "LA_GATE": ELEMENTS[kind.gate], "LA_BEFORE": int(kind.before),
        "LA_BONUS": int(kind.bonus), "LA_WARPS": 8, "LA_END": DELTA_END, "LA_ENDS": ends_bytes(erase),
        "LA_GRAM": SQUARE, "LA_ERASE": int(erase),
    }  # fmt: skip


def ends_bytes(erase: bool) -> int:
    """Of a chunk's G and, with erase, dW.v over 16 value columns each."""
    return DELTA_ENDS if erase else DELTA_END


def reverse_shared(erase: bool) -> int:
    """Bytes of vector_reverse.cu.

    Stages of q, k, dO, P (erase: k twice, A); G after a chunk, tables of two chunks, decays, barriers (v, dW.v).
    """
    stages = 2 if erase else 3
    stage = (3 + erase) * TILE + (1 + erase) * SQUARE
    small = 2 * 2 * TABLE + stages * WIDEST * 4 + erase * (TILE + 8 * TOKEN) + (3 * stages + 1) * BARRIER
    return stages * stage + DELTA_END + small


def grads_shared(erase: bool, exact: bool) -> int:
    """Bytes of vector_grads.cu: copies, halves of S and G, dO, V (erase: dW too), Z, tables."""
    copies, tiles, spare = 2 + erase, 2 + erase, 2 * exact if erase else 1
    size = (copies + spare) * SQUARE + DELTA_END + tiles * TILE + 3 * TABLE + 3 * HALF * 4 + 2 * BARRIER
    return round_up(size + 32, 1024) + TILE + TABLE if exact else size


@functools.cache
def reverse_constants(kind: VectorKind, erase: bool = False, adds: bool = False) -> Constants:
    """The constants of vector_reverse.cu; adds: what a segment adds to the gradient before it."""
    more = {"LA_ADDS": int(adds), "LA_SHARED": reverse_shared(erase)}
    return tuple(sorted({**_common(kind, erase), **more}.items()))


@functools.cache
def grads_constants(kind: VectorKind, erase: bool = False, exact: bool = False) -> Constants:
    """The constants of vector_grads.cu; exact: for chunks that decay too far for scaled copies."""
    more = {"LA_EXACT": int(exact), "LA_SHARED": grads_shared(erase, exact)}
    return tuple(sorted({**_common(kind, erase), **more}.items()))


@functools.cache
def small_constants(kind: VectorKind, erase: bool) -> Constants:
    """The constants of vector_strengths.cu and vector_bonus.cu."""
    return tuple(sorted(_common(kind, erase).items()))


def halves(K: int) -> int:
    """Parts of the key channels that the gradients take one by one."""
    return -(-K // HALF)
