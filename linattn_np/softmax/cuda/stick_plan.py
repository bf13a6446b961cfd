"""Launch plans of the kernels of stick-breaking attention (stick.py). Pure functions of dtypes and shapes."""

from __future__ import annotations

import functools

from ...runtime.cuda.elements import BYTES, ELEMENTS, Constants
from ...runtime.cuda.launch import Kernel
from .. import policy
from .portable_plan import PortableKind

KERNELS = {  # threads for every 16 rows of a block
    "forward": Kernel("softmax_portable/stick_forward.cu", "stick_forward", 32),
    "queries": Kernel("softmax_portable/stick_queries.cu", "stick_queries", 32),
    "keys": Kernel("softmax_portable/stick_keys.cu", "stick_keys", 32),
}  # fmt: skip


@functools.cache
def constants(name: str, kind: PortableKind, limit: int, done: int = 0) -> Constants:
    """The constants that a kernel is compiled with; limit: bytes of shared memory that a block may have.

    done: the results of a launch of `keys`, 1 dv, 2 dk, 3 both.
    """
    element, rows = ELEMENTS[kind.element], block_rows(name, kind, limit)
    return tuple(sorted({
        "LA_DTYPE": element, "LA_INPUT": element, "LA_CACHE": element, "LA_PAST": 0, "LA_GATED": 0, "LA_K": kind.K,
        "LA_V": kind.V, "LA_ALIGN": kind.align, "LA_FEW": policy.FEW_QUERIES, "LA_ROWS": rows,
        "LA_PASS": done, "LA_SHARED": shared_memory(name, kind, rows)}.items()))  # fmt: skip


@functools.cache
def block_rows(name: str, kind: PortableKind, limit: int) -> int:
    """Tokens of a block, the most with which two blocks fit, else one; the passes of the backward have the same."""
    largest = name if name == "forward" else "keys"
    for most in (limit // 2 - 1024, limit):
        for rows in policy.STICK_ROWS:
            if shared_memory(largest, kind, rows) <= most:
                return rows
    raise ValueError(f"no block of {kind} fits in {limit} bytes")


def shared_memory(name: str, kind: PortableKind, rows: int) -> int:
    """Bytes of shared memory of a block, as the source asserts."""
    per = BYTES[kind.element]
    K, V = (-(-width // 16) * 16 * per for width in (kind.K, kind.V))  # bytes of a row
    own = rows * K if name == "forward" else rows * (K + V)
    return own + 2 * rows * (K + V) + (name == "keys") * 2 * rows * rows * per
