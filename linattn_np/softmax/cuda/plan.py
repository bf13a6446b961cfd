"""Launch plans of the softmax kernels (compute capability 90). Pure functions of dtype and shape."""

from __future__ import annotations

import functools
from typing import NamedTuple

from ...runtime.cuda.elements import ELEMENTS, Constants
from .. import policy

BLOCK, PANEL = 128, 64  # rows of a block; columns of a panel in shared memory


class Kernel(NamedTuple):
    """An entry of a source and its threads."""

    file: str
    entry: str
    threads: int


KERNELS = {
    "forward": Kernel("softmax/forward.cu", "forward", 384),
    "queries": Kernel("softmax/queries.cu", "queries", 384),
    "keys": Kernel("softmax/keys.cu", "keys", 384),
    "dots": Kernel("softmax/dots.cu", "dots", 256),
    "decays": Kernel("softmax/gates.cu", "decays", 256),
    "gates": Kernel("softmax/gates.cu", "gates", BLOCK),
}  # fmt: skip


class Kind(NamedTuple):
    """What kernels are compiled for."""

    element: str
    K: int
    V: int
    gated: bool  # logits have sums of log decays


def takes(element: str, K: int, V: int, capability: int) -> bool:
    """Whether the kernels support these widths, padded to multiples of 8."""
    return element in ("bfloat16", "float16") and capability == 90 and 0 < max(K, V) <= policy.WIDEST_CUDA


@functools.cache
def constants(name: str, kind: Kind) -> Constants:
    """The constants that a kernel is compiled with."""
    if name in ("decays", "gates"):
        return ()
    made = {"LA_DTYPE": ELEMENTS[kind.element], "LA_V": kind.V}
    if name != "dots":
        made |= {"LA_K": kind.K, "LA_GATED": int(kind.gated), "LA_SHARED": shared_memory(name, kind)}
    return tuple(sorted(made.items()))


def shared_memory(name: str, kind: Kind) -> int:
    """Bytes of shared memory of a block, as the source asserts."""
    K, V = (2 * -(-width // PANEL) * PANEL for width in (kind.K, kind.V))  # bytes of a row
    if name == "forward":
        return BLOCK * max(K, V) + 2 * BLOCK * (K + V) + kind.gated * 2 * BLOCK * 16 + 2 * 2 * 16 + 16
    if name == "queries":
        tables = kind.gated * (3 * 64 * 16 + 8 * 128 * 4)
        return BLOCK * (K + V) + 3 * 64 * (K + V) + tables + 3 * 16 + 16
    return BLOCK * (K + V) + 3 * 64 * (K + V) + 3 * 64 * 24 + 3 * 16 + 16
