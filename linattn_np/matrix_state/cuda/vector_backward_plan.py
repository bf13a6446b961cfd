"""How the CUDA kernels of the backward of vector decay are cut up. Pure functions of dtype and shape."""

from __future__ import annotations

import functools
from typing import NamedTuple

from ...runtime.cuda.elements import Constants
from .shared_memory import BARRIER, DELTA_END, SQUARE, TILE

REVERSE, GRADS = "vector/vector_reverse.cu", "vector/vector_grads.cu"
CHUNK, WIDEST, HALF = 64, 128, 64  # tokens; columns of a tile; key channels that the gradients take at a time
TABLE = 8 * HALF * 4  # bytes of a number a channel and slice of 8 tokens
STAGES = 3
REVERSE_THREADS, GRADS_THREADS = 512, 256
KINDS = {"bfloat16": 0, "float16": 1, "float32": 2}
EXACT_BLOCKS = 2  # blocks a multiprocessor of the build for chunks that decay too far


class Kind(NamedTuple):
    """What the constants of the kernels depend on."""

    K: int
    V: int
    gate: str  # dtype of the log decays
    before: bool = False  # queries read the state before the token's decay and write
    bonus: bool = False
    erase: bool = False


def _common(kind: Kind) -> dict[str, int]:
    return {
        "LA_DTYPE": 0, "LA_K": kind.K, "LA_V": kind.V, "LA_GATE": KINDS[kind.gate], "LA_BEFORE": int(kind.before),
        "LA_BONUS": int(kind.bonus), "LA_ERASE": int(kind.erase), "LA_WARPS": 8, "LA_END": DELTA_END,
        "LA_ENDS": DELTA_END, "LA_GRAM": SQUARE,
    }  # fmt: skip


def reverse_shared() -> int:
    """Bytes of vector_reverse.cu: stages of q, k, dO, P; tables of two chunks, G after a chunk, decays, barriers."""
    stage = 3 * TILE + SQUARE
    return STAGES * stage + 2 * 2 * TABLE + DELTA_END + STAGES * WIDEST * 4 + 3 * BARRIER * STAGES


def grads_shared(erase: bool, exact: bool) -> int:
    """Bytes of vector_grads.cu: copies, halves of S and G, dO, V (erase: dW too), Z, tables."""
    copies, tiles, spare = 2 + erase, 2 + erase, 2 * exact if erase else 1
    return (copies + spare) * SQUARE + DELTA_END + tiles * TILE + 3 * TABLE + 2 * HALF * 4 + 2 * BARRIER


@functools.cache
def reverse_constants(kind: Kind, adds: bool = False) -> Constants:
    """The constants of vector_reverse.cu; adds: what a segment adds to the gradient before it."""
    return tuple(sorted({**_common(kind), "LA_ADDS": int(adds), "LA_SHARED": reverse_shared()}.items()))


@functools.cache
def grads_constants(kind: Kind, exact: bool = False) -> Constants:
    """The constants of vector_grads.cu; exact: for chunks that decay too far for scaled copies."""
    more = {"LA_EXACT": int(exact), "LA_SHARED": grads_shared(kind.erase, exact)}
    return tuple(sorted({**_common(kind), **more}.items()))


def halves(K: int) -> int:
    """Parts of the key channels that the gradients take one by one."""
    return -(-K // HALF)
