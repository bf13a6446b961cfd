"""What a kernel is told: three tables of whole numbers, made here and read there.

arrays  where each array of a call lies, a row each: address, strides, heads that share a head, storage dtype
n       the sizes and kinds of a call
w       where the matrices of one task lie in a thread's own memory: address, elements from a row to the next
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from ...ground.namespace import dtype_name
from ...pieces.numba_rows import STORAGE as STORAGES
from ...pieces.numba_tiles import BYTES, PAD
from ..kinds import Decay, Erase, Row
from ..numba_decay import BLOCK, NO_DECAY, SCALAR, VECTOR
from .inputs import Inputs, Plan

# arrays: rows, and columns
IN_Q, IN_K, IN_V, IN_G, IN_READ, IN_BETA, IN_PUSH, IN_BONUS, IN_STATE, OUT, OUT_STATE = range(11)
IN_DOUT, IN_DSTATE, OUT_DQ, OUT_DK, OUT_DV, OUT_DG, OUT_DREAD, OUT_DBETA, OUT_DSTATE = range(11, 20)
IN_FADE = 20
ARRAYS = 21
AT, BATCH, TOKEN, HEAD, CHANNEL, SHARED, STORAGE = range(7)

# n: sizes, then kinds, then yes or no
(N_K, N_V, HEADS, QUERIES, CHUNK, COLUMNS, BLOCKS, DECAY, ERASE,
 EARLY_QUERY, EARLY_READ, OWN_READ, ASKED, WITH_BONUS, STARTED, WITH_FADE, DIRECT) = range(17)  # fmt: skip
NO_ERASE, DELTA, FREE = 0, 1, 2

# w: S (K, V) the state; K, B, R, Q, HAT (C, K) writers k and b, readers r or a and q, a reader as it sees S; KT, BT
# turned; X, Y (C, V) values written with k and b; P (C, C) what queries find, N (C, C) the system of erasing;
# E (C, C) e^{s(j, i)} with a row above; GATE (C, K) e^g by channel, FIRST and LAST (C, K) its products from the start
# (with a row above) and to the end; NEAR, FAR, FART for grams by blocks; START (C + 1) e^{s(start, i - 1)}; END (C);
# BETA, FACTOR (C); G, SUMS (C + 1) float64; BONUS (K); CONSTANTS 1, scale, -1
MATRICES = 27
(S, K, KT, R, B, BT, Q, HAT, X, Y, P, N, E, GATE, FIRST, LAST, NEAR, FAR, FART, START, END, BETA, FACTOR, G, SUMS,
 BONUS, CONSTANTS) = range(MATRICES)  # fmt: skip


class Table:
    """The table `arrays`; keeps the arrays alive."""

    def __init__(self, x: Inputs):
        self.numbers = np.zeros((ARRAYS, 7), np.int64)
        self.numbers[:, SHARED] = 1
        self.kept: list[Any] = []
        self.H = x.v.shape[-2]
        self.asking = self.H if x.q is None else max(self.H, x.q.shape[-2])
        self.tokens(IN_Q, x.q, self.asking)
        for name, y in ((IN_K, x.k), (IN_V, x.v), (IN_G, x.g), (IN_READ, x.r if x.a is None else x.a),
                        (IN_BETA, x.beta), (IN_PUSH, x.b), (IN_FADE, x.gv)):  # fmt: skip
            self.tokens(name, y, self.H)
        if x.u is not None:
            self._put(IN_BONUS, x.u, (0, 0, *x.u.strides), self.H // x.u.shape[0])

    def tokens(self, name: int, y: np.ndarray | None, heads: int) -> None:
        """An array (..., T, H', D) for `heads` heads; one batch row, or none, is shared by the batch."""
        if y is None:
            return
        y = y.reshape((-1, *y.shape[-3:]))
        steps = (0, *y.strides[1:]) if y.shape[0] == 1 else y.strides
        self._put(name, y, steps, heads // y.shape[-2])

    def states(self, name: int, y: np.ndarray | None) -> None:
        """An array (..., H, K, V): rows of the state take the place of tokens."""
        if y is None:
            return
        y = y.reshape((-1, *y.shape[-3:]))
        batch, head, k, v = y.strides
        self._put(name, y, (batch, k, head, v), 1)

    def _put(self, name: int, y: np.ndarray, steps: tuple[int, ...], shared: int) -> None:
        self.kept.append(y)
        at = y.__array_interface__["data"][0]
        self.numbers[name] = (at, *steps, shared, STORAGES[dtype_name(y)])


def sizes(x: Inputs, plan: Plan, chunk: int, columns: int, started: bool) -> np.ndarray:
    """The table `n`."""
    H, width, V = x.v.shape[-2], x.k.shape[-1], x.v.shape[-1]
    return np.array([
        width, V, H, 1 if x.q is None else max(1, x.q.shape[-2] // H), max(1, min(chunk, x.v.shape[-3])),
        columns, -(-V // columns),
        {Decay.NONE: NO_DECAY, Decay.SCALAR: SCALAR, Decay.VECTOR: VECTOR}[x.decay],
        {Erase.NONE: NO_ERASE, Erase.DELTA: DELTA, Erase.FREE: FREE}[x.erase],
        plan.query_row is Row.BEFORE, x.erase is Erase.FREE or plan.erase_row is Row.BEFORE,
        x.erase is Erase.FREE or x.r is not x.k, x.q is not None, x.u is not None, started, x.gv is not None, False,
    ], np.int64)  # fmt: skip


def sequences(plan: Plan, batch: int) -> np.ndarray:
    """Rows (batch row, start, stop, row of the state)."""
    if plan.sequences and plan.sequences[0].row is None:
        start, stop = plan.sequences[0][1:]
        rows = [(b, start, stop, b) for b in range(batch)]
    else:
        rows = [(0, s.start, s.stop, s.row) for s in plan.sequences]
    return np.array(rows, np.int64).reshape(-1, 4)


class Layout:
    """The table `w`, counted from address 0, and how many bytes it takes. Sides are whole squares of a transpose."""

    def __init__(self, n: np.ndarray, dtype: np.dtype):
        self.rows = np.zeros((MATRICES, 2), np.int64)
        self.bytes, self.lane = 0, BYTES // dtype.itemsize
        C, D, V = -(-n[CHUNK] // PAD) * PAD, n[N_K], n[COLUMNS]
        for name, m, width in ((S, D, V), (K, C, D), (KT, D, C), (Q, C, D), (X, C, V), (P, C, C), (E, C + 1, C),
                               (START, 1, C + 1), (END, 1, C), (BETA, 1, C), (FACTOR, 1, C), (G, 1, 2 * C + 2),
                               (SUMS, 1, 2 * C + 66), (BONUS, 1, D), (CONSTANTS, 1, 3)):  # fmt: skip
            self._place(name, m, width, dtype.itemsize)
        self._alias(K, R)
        self._alias(Q, HAT)
        if n[ERASE] != NO_ERASE:
            self._place(N, C, C, dtype.itemsize)
            if n[OWN_READ]:
                self._place(R, C, D, dtype.itemsize)
        if n[ERASE] == FREE:
            for name, m, width in ((B, C, D), (BT, D, C), (Y, C, V)):
                self._place(name, m, width, dtype.itemsize)
        if n[DECAY] == VECTOR:
            for name, m, width in ((HAT, C, D), (GATE, C, D), (FIRST, C + 1, D), (LAST, C, D), (NEAR, BLOCK, D),
                                   (FAR, C, D), (FART, D, C)):  # fmt: skip
                self._place(name, m, width, dtype.itemsize)
        for name in (E, FIRST):  # row 0 is the second
            self.rows[name, 0] += self.rows[name, 1] * dtype.itemsize

    def _place(self, name: int, m: int, width: int, size: int) -> None:
        up = lambda i: -(-i // self.lane) * self.lane  # noqa: E731
        self.rows[name] = self.bytes, up(width)
        self.bytes += int(up(m) * up(width)) * size

    def _alias(self, name: int, other: int) -> None:
        self.rows[other] = self.rows[name]

    def at(self, address: int) -> np.ndarray:
        """The table for memory that begins at an address."""
        w = self.rows.copy()
        w[:, 0] += -(-address // 64) * 64
        return w


_own = threading.local()


def memory(count: int) -> np.ndarray:
    """This thread's working memory, at least `count` bytes and 64 to align them."""
    held = getattr(_own, "memory", None)
    if held is None or held.size < count + 64:
        held = _own.memory = np.empty(count + 64, np.uint8)
    return held
