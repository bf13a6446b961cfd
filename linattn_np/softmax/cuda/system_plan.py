"""Launch plans of the kernels of linear systems (system.py). Pure functions of dtypes and shapes."""

from __future__ import annotations

import functools

from ...runtime.cuda.elements import BYTES, ELEMENTS, Constants
from ...runtime.cuda.launch import Kernel
from .. import policy
from .portable_plan import PortableKind

KERNELS = {  # threads for every 16 rows of a block
    "forward": Kernel("softmax_portable/system_forward.cu", "system_forward", 32),
    "backward": Kernel("softmax_portable/system_backward.cu", "system_backward", 32),
}  # fmt: skip


@functools.cache
def constants(name: str, kind: PortableKind, limit: int) -> Constants:
    """The constants that a kernel is compiled with; limit: bytes of shared memory that a block may have."""
    element, rows = ELEMENTS[kind.element], block_rows(name, kind, limit)
    return tuple(sorted({
        "LA_DTYPE": element, "LA_INPUT": element, "LA_CACHE": element, "LA_PAST": 0, "LA_GATED": int(kind.gated),
        "LA_K": kind.K, "LA_V": kind.V, "LA_ALIGN": kind.align, "LA_FEW": policy.FEW_QUERIES, "LA_ROWS": rows,
        "LA_BACK": int(name == "backward"), "LA_SHARED": shared_memory(name, kind, rows)}.items()))  # fmt: skip


def block_rows(name: str, kind: PortableKind, limit: int) -> int:
    """Rows of a block: the most with which two blocks fit, else one."""
    for most in (limit // 2 - 1024, limit):
        for rows in policy.SYSTEM_ROWS:
            if shared_memory(name, kind, rows) <= most:
                return rows
    raise ValueError(f"no block of {kind} fits in {limit} bytes")


def shared_memory(name: str, kind: PortableKind, rows: int) -> int:
    """Bytes of shared memory of a block, as the source asserts."""
    K, V = (-(-width // 16) * 16 * BYTES[kind.element] for width in (kind.K, kind.V))  # bytes of a row
    stages = 2 * rows * (K + V + kind.gated * 16 + (name == "backward") * 4)
    end = rows * ((-(-kind.V // 16) * 16 + 8) * 4 + V)  # sums and values, in the place of the tiles
    return rows * (K + (rows + 4) * 4 + 4) + max(stages, end)
