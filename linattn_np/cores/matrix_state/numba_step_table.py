"""Where the matrices of the recurrent form's kernel lie in a thread's own memory.

w: KEYS, READS r e^g or a, PUSHES b (C, K); DECAYS e^g (C, K or 1); QUERY (C queries, K); NOTHING (K) zeros; U (K);
BETA (C); BONUS (C queries); PACKED (K, block) the state between two tokens; VALUES v, WRITTEN, RECALLED, SEEN,
FADE e^{gv} (block); TABLE the arrays of the call, whole numbers
"""

from __future__ import annotations

import functools
import threading

import numpy as np

from ...pieces.numba_fetch import FIELDS
from ...pieces.numba_state import WIDE
from ...pieces.numba_tiles import BYTES
from .numba_table import ARRAYS

TOKENS = 32  # whose vectors are in memory at once
MATRICES = 16
(KEYS, READS, PUSHES, DECAYS, QUERY, NOTHING, U, BETA, BONUS, PACKED, VALUES, WRITTEN, RECALLED, SEEN,
 FADE, TABLE) = range(MATRICES)  # fmt: skip


@functools.lru_cache(maxsize=64)
def layout(K: int, queries: int, tokens: int, size: int) -> tuple[np.ndarray, int]:
    """The table `w`: bytes from the beginning and from a row to the next, and how many bytes it takes."""
    block, wide = WIDE * BYTES, -(-K * size // BYTES) * BYTES
    rows, used = np.zeros((MATRICES, 2), np.int64), 0
    for name, m, width in ((KEYS, tokens, wide), (READS, tokens, wide), (PUSHES, tokens, wide), (DECAYS, tokens, wide),
                           (QUERY, tokens * queries, wide), (NOTHING, 1, max(wide, block)), (U, 1, wide),
                           (BETA, 1, tokens * size), (BONUS, 1, tokens * queries * size), (PACKED, K, block),
                           *((name, 1, block) for name in (VALUES, WRITTEN, RECALLED, SEEN, FADE)),
                           (TABLE, ARRAYS, 8 * FIELDS)):  # fmt: skip
        rows[name] = used, width
        used += -(-m * width // BYTES) * BYTES
    return rows, used


class _Own(threading.local):
    held: np.ndarray | None = None
    bytes = at = 0


_own = _Own()


def memory(count: int) -> int:
    """Address of this thread's working memory: at least `count` bytes from a multiple of 64 on."""
    if _own.bytes < count:
        _own.held = np.empty(count + BYTES, np.uint8)
        _own.bytes, _own.at = count, -(-_own.held.__array_interface__["data"][0] // BYTES) * BYTES
    return _own.at
