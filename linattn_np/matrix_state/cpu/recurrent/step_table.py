"""What the recurrent form's kernel is told besides the table of arrays, and where its own matrices lie.

n  the sizes and kinds of a call
w  its own matrices, in a thread's memory: bytes from the beginning, and from a row to the next
"""

from __future__ import annotations

import functools

import numpy as np

from ....runtime.compiled.emit import BYTES
from ....runtime.compiled.state import WIDE
from ...types import Decay, Erase, Inputs, Plan, ReadState
from ..memory import Scratch
from ..table import ARRAYS

TOKENS = 32  # whose vectors are in memory at once
FIELDS = 7  # columns of the table of arrays

(N_K, N_V, HEADS, QUERIES, COLUMNS, BLOCKS, DECAY, ERASE, EARLY_QUERY, EARLY_READ, OWN_READ, ASKED, WITH_BONUS,
 WITH_FADE, STARTED, DIRECT) = range(16)  # fmt: skip
NO_DECAY, SCALAR, VECTOR = range(3)
NO_ERASE, DELTA, FREE = range(3)

# KEYS, READS r e^g or a, PUSHES b (C, K); DECAYS e^g (C, K or 1); QUERY (C queries, K); NOTHING (K) zeros; U (K);
# BETA (C); BONUS (C queries); PACKED (K, block) the state between two tokens; VALUES v, WRITTEN, RECALLED, SEEN,
# FADE e^{gv} (block); CONSTANTS 1, scale; TABLE the arrays of the call
MATRICES = 17
(KEYS, READS, PUSHES, DECAYS, QUERY, NOTHING, U, BETA, BONUS, PACKED, VALUES, WRITTEN, RECALLED, SEEN, FADE, CONSTANTS,
 TABLE) = range(MATRICES)  # fmt: skip


def sizes(x: Inputs, plan: Plan, state: np.ndarray | None, columns: int) -> np.ndarray:
    """The table `n`."""
    H, K, V, dtype = x.v.shape[-2], x.k.shape[-1], x.v.shape[-1], np.dtype(plan.dtype)
    direct = state is not None and state.dtype == dtype and state.strides[-1] == dtype.itemsize
    return np.array([
        K, V, H, 1 if x.q is None else max(1, x.q.shape[-2] // H), columns, -(-V // columns),
        {Decay.NONE: NO_DECAY, Decay.SCALAR: SCALAR, Decay.VECTOR: VECTOR}[x.decay],
        {Erase.NONE: NO_ERASE, Erase.DELTA: DELTA, Erase.FREE: FREE}[x.erase],
        plan.query_reads is ReadState.PREVIOUS, x.erase is Erase.FREE or plan.erase_reads is ReadState.PREVIOUS,
        x.erase is Erase.FREE or not plan.erases_key, x.q is not None, x.u is not None, x.gv is not None,
        state is not None, direct,
    ], np.int64)  # fmt: skip


@functools.lru_cache(maxsize=64)
def layout(K: int, queries: int, tokens: int, size: int) -> tuple[np.ndarray, int]:
    """The table `w`, and how many bytes it takes."""
    block, wide = WIDE * BYTES, -(-K * size // BYTES) * BYTES
    rows, used = np.zeros((MATRICES, 2), np.int64), 0
    for name, m, width in ((KEYS, tokens, wide), (READS, tokens, wide), (PUSHES, tokens, wide), (DECAYS, tokens, wide),
                           (QUERY, tokens * queries, wide), (NOTHING, 1, max(wide, block)), (U, 1, wide),
                           (BETA, 1, tokens * size), (BONUS, 1, tokens * queries * size), (PACKED, K, block),
                           *((name, 1, block) for name in (VALUES, WRITTEN, RECALLED, SEEN, FADE)),
                           (CONSTANTS, 1, 2 * size), (TABLE, ARRAYS, 8 * FIELDS)):  # fmt: skip
        rows[name] = used, width
        used += -(-m * width // BYTES) * BYTES
    return rows, used


_own = Scratch()


def memory(count: int) -> tuple[np.ndarray, int]:
    """This thread's working memory, at least `count` bytes: its owner, and its address."""
    return _own.take(count)
