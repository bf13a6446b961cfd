"""The running maximum of ops/stabiliser.py in one pass over the tokens, with the gates that it stabilises."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...runtime.arrays import name_of
from ...runtime.constants import host_constants
from ...runtime.pieces.memory import empty
from ...runtime.pieces.piece import Whole, piece, workspace_kind
from ...runtime.pieces.run import over_matrices
from ...runtime.pieces.views import row
from ...runtime.pieces.workspace import Matrix, Workspace
from ...runtime.tracing import traced
from .formulas import compiled
from .numbers import exp, number

WIDE = {name: Matrix("count", "H", dtype="float64") for name in ("a", "b", "m")}
GAUGE = Workspace("gauge", ("count", "T", "H", "states", "sequences", "four"), (), (), {"given": WIDE | {
    "m_0": Matrix("states", "H"), **{name: Matrix("count", "H") for name in ("decay", "write", "least")},
    "cuts": Matrix("sequences", "four", dtype="int64"), "rounds": Matrix("T", dtype="int64")}})  # fmt: skip
Work = workspace_kind(GAUGE)


@piece
def gauge_sequences(w: Work, first: Whole, last: Whole):
    """m_t = max(a_t + m_{t-1}, b_t), e^{a_t + m_{t-1} - m_t}'s logarithm, e^{b_t - m_t} and e^{-m_t} of sequences.

    m is rounded to the dtype of states where `rounds` says so.
    """
    for n in range(first, last):
        cut = row(w.cuts, n)  # batch row, state, first token, the one after the last
        for t in range(cut[2], cut[3]):
            i = cut[0] * w.T + t
            a, b, m, before = row(w.a, i), row(w.b, i), row(w.m, i), row(w.m, i - 1)
            decay, write, least, begin = row(w.decay, i), row(w.write, i), row(w.least, i), row(w.m_0, cut[1])
            for h in range(w.H):
                faded = a[h] + (begin[h] if t == cut[2] else before[h])
                most = b[h] if b[h] > faded else faded
                if w.rounds[t]:
                    most = number(decay, most)
                m[h] = most
                decay[h], write[h], least[h] = faded - most, exp(b[h] - most), exp(-most)


def gauge(a: Any, b: Any, m_0: Any, sequences: Any, dtype: Any, ends: tuple[int, ...]) -> tuple[Any, ...]:
    """(m float64; decay, write and e^{-m} in `dtype`), of a and b (..., T, H) in float64; ends: tokens that round m."""
    (*_, T, H), dtype = a.shape, np.dtype(dtype)
    trace, batch = next((t for y in (a, b, m_0) if (t := traced(y)) is not None), None), a.size // max(T * H, 1)
    new = empty if trace is None else trace.new
    m, decay, write, least = (new(a.shape, d) for d in (np.dtype(np.float64), dtype, dtype, dtype))
    if not a.size:
        return m, decay, write, least
    if m_0.dtype != dtype or not m_0.flags.c_contiguous:
        m_0 = compiled("copy", (m_0,), (m_0.shape, dtype), np.float64)

    def cuts() -> np.ndarray:
        if sequences[0].row is None:
            return np.array([(n, n, 0, T) for n in range(batch)], np.int64)
        return np.array([(0, s.row, s.start, s.stop) for s in sequences], np.int64)

    def rounds() -> np.ndarray:
        return np.isin(np.arange(T), ends).astype(np.int64)

    key = ("gauge", batch, T, tuple(sequences))
    cut, rounding = host_constants.once(key, cuts), host_constants.once((*key, ends), rounds)
    sizes = {"count": batch * T, "T": T, "H": H, "states": m_0.size // H, "sequences": len(cut), "four": 4}
    arrays = {"a": a, "b": b, "m_0": m_0, "cuts": cut, "rounds": rounding, "decay": decay, "write": write,
              "least": least, "m": m}  # fmt: skip
    over_matrices(gauge_sequences, GAUGE, sizes | arrays, len(cut), name_of(dtype), trace)
    return tuple(y if trace is None else trace.view(y) for y in (m, decay, write, least))
