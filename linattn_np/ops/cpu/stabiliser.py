"""Running maxima and sums in log space (ops/stabiliser.py, ops/shares.py), with their gates: one pass over tokens."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...runtime.arrays import name_of
from ...runtime.constants import host_constants
from ...runtime.pieces.memory import working
from ...runtime.pieces.piece import Vector, Whole, Wide, piece, workspace_kind
from ...runtime.pieces.run import over_matrices
from ...runtime.pieces.views import columns, row
from ...runtime.pieces.workspace import Matrix, Workspace
from .formulas import compiled
from .numbers import exp, log, log1p, number

COLUMNS, ALONE = 128, 2**14  # of a task; numbers of a call that one task computes
WIDE = {"a": Matrix("given", "H", dtype="float64")} | {n: Matrix("count", "H", dtype="float64") for n in ("b", "m")}
SIZES = ("count", "T", "H", "states", "sequences", "four", "sums", "blocks", "each", "given")
GAUGE = Workspace("gauge", SIZES, (), (), {
    "given": WIDE | {"start": Matrix("sequences", "H", dtype="float64"), "m_0": Matrix("states", "H"),
                     "cuts": Matrix("sequences", "four", dtype="int64"), "rounds": Matrix("T", dtype="int64")} | {
        name: Matrix("count", "H") for name in ("decay", "write", "level")}})  # fmt: skip
Work = workspace_kind(GAUGE)


@piece
def maximum(a: Wide, b: Wide, before: Wide, rounds: Whole, m: Wide, decay: Vector, write: Vector, level: Vector):
    """m_t = max(a_t + m_{t-1}, b_t); a_t + m_{t-1} - m_t, e^{b_t - m_t} and e^{-m_t}.   rounds: m to their dtype"""
    for h in range(len(m)):
        faded = a[h] + before[h]
        most = b[h] if b[h] > faded else faded
        if rounds:
            most = number(decay, most)
        m[h] = most
        decay[h], write[h], level[h] = faded - most, exp(b[h] - most), exp(-most)


@piece
def log_sum(b: Wide, before: Wide, m: Wide, decay: Vector, write: Vector, level: Vector):
    """m_t = log(e^{m_{t-1}} + e^{b_t}); m_{t-1} - m_t, e^{b_t - m_t} and e^{m_t}; all 0 where m_t = -inf"""
    for h in range(len(m)):
        high, low = b[h] if b[h] > before[h] else before[h], before[h] if b[h] > before[h] else b[h]
        total = high if high == -np.inf else high + log1p(exp(low - high))
        fade, share = before[h] - total, exp(b[h] - total)
        m[h] = total
        decay[h], write[h] = 0.0 if total == -np.inf else fade, 0.0 if total == -np.inf else share
        level[h] = exp(total)


@piece
def begin(m_0: Vector, sums: Whole, m: Wide):
    """m before the first token: m_0, or the logarithm of a sum; of none -inf."""
    for h in range(len(m)):
        x = np.float64(m_0[h])
        m[h] = (-np.inf if x <= 0 else log(x)) if sums else x


@piece
def accumulate(w: Work, first: Whole, last: Whole):
    """Tasks first..last: a sequence and a block of columns."""
    for task in range(first, last):
        cut, c = row(w.cuts, task // w.blocks), task % w.blocks * w.each  # batch row, state, first token, the last + 1
        n = min(w.each, w.H - c)
        a, b, m = columns(w.a, c, n), columns(w.b, c, n), columns(w.m, c, n)
        decay, write, level = columns(w.decay, c, n), columns(w.write, c, n), columns(w.level, c, n)
        for t in range(cut[2], cut[3]):
            i = cut[0] * w.T + t
            before = row(m, i - 1)
            if t == cut[2]:  # in memory of its own: loops over rows that may be one are not vectors
                before = row(columns(w.start, c, n), task // w.blocks)
                begin(row(columns(w.m_0, c, n), cut[1]), w.sums, before)
            if w.sums:
                log_sum(row(b, i), before, row(m, i), row(decay, i), row(write, i), row(level, i))
            else:
                maximum(row(a, i), row(b, i), before, w.rounds[t], row(m, i), row(decay, i), row(write, i),
                        row(level, i))  # fmt: skip


def cuts(batch: int, T: int, sequences: Any) -> np.ndarray:
    """Of each sequence its batch row, its state, its first token and the one after its last."""

    def make() -> np.ndarray:
        if sequences and sequences[0].row is None:
            return np.array([(n, n, 0, T) for n in range(batch)], np.int64).reshape(-1, 4)
        return np.array([(0, s.row, s.start, s.stop) for s in sequences], np.int64).reshape(-1, 4)

    return host_constants.once(("cuts", batch, T, tuple(sequences)), make)


def blocks_of(numbers: int, H: int) -> int:
    """Blocks of columns of a call, for threads."""
    return 1 if numbers <= ALONE else -(-H // COLUMNS)


def accumulated(a: Any, b: Any, m_0: Any, sequences: Any, dtype: Any, ends: tuple[int, ...] | None = ()
                ) -> tuple[Any, ...]:  # fmt: skip
    """(m in float64; decay, write and level in `dtype`) of b (..., T, H) in float64, and of a, None: of a sum.

    m_0 (states, H): before the first tokens. ends: the tokens that round m; None: all.
    """
    (*_, T, H), dtype, sums = b.shape, np.dtype(dtype), a is None
    batch = b.size // max(T * H, 1)
    m, decay, write, level = (working(b.shape, d) for d in (np.dtype(np.float64), dtype, dtype, dtype))
    if not b.size:
        return m, decay, write, level
    if m_0.dtype != dtype or not m_0.flags.c_contiguous:
        m_0 = compiled("copy", (m_0,), (m_0.shape, dtype), np.float64)

    a, b = (y if y is None or y.flags.c_contiguous else compiled("copy", (y,), (y.shape, y.dtype), np.float64)
            for y in (a, b))  # fmt: skip

    def rounds() -> np.ndarray:
        return np.isin(np.arange(T), np.arange(T) if ends is None else ends).astype(np.int64)

    cut, blocks = cuts(batch, T, sequences), blocks_of(b.size, H)
    rounding = host_constants.once(("rounds", T, ends), rounds)
    sizes = {"count": batch * T, "T": T, "H": H, "states": m_0.size // H, "sequences": len(cut), "four": 4,
             "sums": int(sums), "blocks": blocks, "each": -(-H // blocks),
             "given": 0 if sums else batch * T}  # fmt: skip
    arrays = {"b": b, "m_0": m_0, "cuts": cut, "rounds": rounding, "decay": decay, "write": write, "level": level}
    arrays |= {"start": working((len(cut), H), m.dtype), "m": m} | ({} if sums else {"a": a})
    over_matrices(accumulate, GAUGE, sizes | arrays, len(cut) * blocks, name_of(dtype))
    return m, decay, write, level
