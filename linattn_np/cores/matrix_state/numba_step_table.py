"""Where the matrices of the recurrent form's kernel lie in a thread's own memory.

w: KEYS, READS r e^g or a, PUSHES b (C, K); DECAYS e^g (C, K or 1); QUERY (C queries, K); NOTHING (K) zeros; U (K);
BETA (C); BONUS (C queries); PACKED (K, block) the state between two tokens; VALUES v, WRITTEN, RECALLED, SEEN,
FADE e^{gv} (block)
"""

from __future__ import annotations

import functools

import numpy as np

from ...pieces.numba_state import LANES
from ...pieces.numba_tiles import BYTES

TOKENS = 32  # whose vectors are in memory at once
MATRICES = 15
(KEYS, READS, PUSHES, DECAYS, QUERY, NOTHING, U, BETA, BONUS, PACKED, VALUES, WRITTEN, RECALLED, SEEN,
 FADE) = range(MATRICES)  # fmt: skip


@functools.lru_cache(maxsize=64)
def layout(K: int, queries: int, tokens: int, size: int) -> tuple[np.ndarray, int]:
    """The table `w`, bytes from the beginning and elements to the next row, and how many bytes it takes."""
    lane, block = BYTES // size, BYTES // size * LANES
    rows, used = np.zeros((MATRICES, 2), np.int64), 0
    for name, m, width in ((KEYS, tokens, K), (READS, tokens, K), (PUSHES, tokens, K), (DECAYS, tokens, K),
                           (QUERY, tokens * queries, K), (NOTHING, 1, K), (U, 1, K), (BETA, 1, tokens),
                           (BONUS, 1, tokens * queries), (PACKED, K, block), (VALUES, 1, block), (WRITTEN, 1, block),
                           (RECALLED, 1, block), (SEEN, 1, block), (FADE, 1, block)):  # fmt: skip
        width = -(-width // lane) * lane
        rows[name] = used, width
        used += m * width * size
    return rows, used
