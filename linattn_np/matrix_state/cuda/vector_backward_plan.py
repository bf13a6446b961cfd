"""How the CUDA kernels of the backward of vector decay are cut up. Pure functions of dtype and shape."""

from __future__ import annotations

import functools

from ...runtime.cuda.elements import ELEMENTS, Constants
from .delta_plan import Kernel
from .shared_memory import DELTA_END, PANEL, vector_ends, vector_gradients, vector_gram, vector_reverse
from .vector_plan import VectorKind

REVERSE = Kernel("vector_backward/vector_reverse.cu", "reverse", 512)
GRADS = Kernel("vector_backward/vector_grads.cu", "grads", 256)
STRENGTHS = Kernel("vector_backward/vector_strengths.cu", "strengths", 256)
BONUS = Kernel("vector_backward/vector_bonus.cu", "bonus", 256)


def _common(kind: VectorKind, erase: bool) -> dict[str, int]:
    return {
        "LA_DTYPE": 0, "LA_K": kind.K, "LA_V": kind.V, "LA_GATE": ELEMENTS[kind.gate], "LA_BEFORE": int(kind.before),
        "LA_BONUS": int(kind.bonus), "LA_WARPS": 8, "LA_END": DELTA_END, "LA_ENDS": vector_ends(erase),
        "LA_GRAM": vector_gram(erase), "LA_ERASE": int(erase),
    }  # fmt: skip


@functools.cache
def reverse_constants(kind: VectorKind, erase: bool = False, adds: bool = False, at: int = 0) -> Constants:
    """The constants of vector_reverse.cu; adds: what a segment adds to the gradient before it; at: positions."""
    more = {"LA_ADDS": int(adds), "LA_SHARED": vector_reverse(erase)} | ({"LA_AT": at} if at else {})
    return tuple(sorted({**_common(kind, erase), **more}.items()))


@functools.cache
def grads_constants(kind: VectorKind, erase: bool = False, exact: bool = False, dq: str = "bfloat16") -> Constants:
    """The constants of vector_grads.cu; exact: for chunks that decay too far for scaled copies. dq: its dtype."""
    more = {"LA_EXACT": int(exact), "LA_SHARED": vector_gradients(erase, exact)}
    more |= {"LA_DQ": ELEMENTS[dq]} if dq != "bfloat16" else {}
    return tuple(sorted({**_common(kind, erase), **more}.items()))


@functools.cache
def small_constants(kind: VectorKind, erase: bool) -> Constants:
    """The constants of vector_strengths.cu and vector_bonus.cu."""
    return tuple(sorted(_common(kind, erase).items()))


def halves(K: int) -> int:
    """Parts of the key channels that the gradients take one by one."""
    return -(-K // PANEL)
