"""Launch plans of the softmax kernels (compute capability 90). Pure functions of dtype and shape."""

from __future__ import annotations

import functools
from typing import NamedTuple

from ...runtime.cuda.elements import ELEMENTS, Constants
from ...runtime.cuda.launch import Kernel
from .. import policy

BLOCK, PANEL = 128, 64  # rows of a block; columns of a panel in shared memory
ROWS = 64  # queries of a tile of the backward


KERNELS = {
    "forward": Kernel("softmax/forward.cu", "forward", 384),
    "dots": Kernel("softmax/dots.cu", "dots", 256),
    "backward": Kernel("softmax/backward.cu", "backward", 384),
    "dq": Kernel("softmax/dq.cu", "dq", 256),
    "decays": Kernel("softmax/gates.cu", "decays", 256),
    "norms": Kernel("softmax/norms.cu", "norms", 256),
    "gates": Kernel("softmax/gates.cu", "gates", BLOCK),
    "sinks": Kernel("softmax/sinks.cu", "sinks", 512),
}  # fmt: skip


class SoftmaxKind(NamedTuple):
    """The parameters that kernels are compiled for."""

    element: str
    K: int
    V: int
    gated: bool  # logits have sums of log decays
    polynomial: bool = False  # weights are a polynomial of the logits


def takes(element: str, K: int, V: int, capability: int) -> bool:
    """Whether the kernels support these widths, padded to multiples of 8."""
    return element in ("bfloat16", "float16") and capability == 90 and 0 < max(K, V) <= policy.WIDEST_CUDA


def padded(width: int) -> int:
    """Columns in shared memory."""
    return -(-width // PANEL) * PANEL


def tile_dq(kind: SoftmaxKind) -> int:
    """Numbers of a tile of dq: with decays also a sum of dz for each query."""
    return ROWS * (padded(kind.K) + kind.gated)


@functools.cache
def constants(name: str, kind: SoftmaxKind) -> Constants:
    """The constants that a kernel is compiled with."""
    if name in ("decays", "gates", "sinks"):
        return ()
    values = {"LA_DTYPE": ELEMENTS[kind.element]} | ({"LA_K": kind.K} if name == "norms" else {"LA_V": kind.V})
    if name not in ("dots", "norms"):
        values |= {"LA_K": kind.K, "LA_GATED": int(kind.gated), "LA_SHARED": shared_memory(name, kind)}
    if kind.polynomial and name in ("forward", "backward"):
        values["LA_POLYNOMIAL"] = 1
    return tuple(sorted(values.items()))


def shared_memory(name: str, kind: SoftmaxKind) -> int:
    """Bytes of shared memory of a block, as the source asserts."""
    K, V = (2 * padded(width) for width in (kind.K, kind.V))  # bytes of a row
    if name == "forward":
        return BLOCK * max(K, V) + 2 * BLOCK * (K + V) + kind.gated * (2 * (BLOCK * 4 + 16) + 48) + 2 * 2 * 16 + 32
    if name == "dq":
        return 0
    stages, dz, ones = ROWS * (3 * K + 2 * V), 2 * ROWS * 2 * BLOCK, kind.gated * BLOCK * 128
    return BLOCK * (K + V) + stages + dz + ones + 4 * tile_dq(kind) + 3 * ROWS * 8 + 6 * 16 + 16
