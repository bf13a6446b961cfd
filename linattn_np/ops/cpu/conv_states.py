"""The last S inputs of each sequence, and their gradient, in compiled loops: ops/sequences.py:last has the equation.

    end_s = x_{count - S + s}, or of `past` or 0 where that lies before the first token

Sequences are as in short_conv.py. `end` may be `past`: a slot is written after it was read.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...runtime.constants import constant_zeros
from ...runtime.pieces.memory import empty
from ...runtime.pieces.piece import Whole, piece, workspace_kind
from ...runtime.pieces.run import over_matrices
from ...runtime.pieces.tiles import copy_row
from ...runtime.pieces.views import row
from ...runtime.pieces.workspace import Matrix as Field
from ...runtime.pieces.workspace import Workspace
from ...runtime.recorder import constant
from ..sequences import Sequences, table
from .formulas import dense
from .loops import over
from .row_norms import plus, rows_of

BLOCK = 2**15  # numbers of a task
STATES = Workspace("conv_states", ("D", "S", "each", "length", "pooled", "pooled_end", "has_past"), (), (), {"given": {
    "x": Field("count", "D"), "past": Field("places", "D"), "end": Field("ends", "D"), "zeros": Field("one", "D"),
    "start": Field("N", dtype="int64"), "size": Field("N", dtype="int64"),
    "rows": Field("N", dtype="int64")}})  # fmt: skip
Work = workspace_kind(STATES)


@piece
def ended(w: Work, begin: Whole, stop: Whole):
    """end, of tasks begin..stop of `each` sequences; pooled, pooled_end: past, end are rows of a pool, -1: none."""
    for n in range(begin * w.each, min(stop * w.each, w.N)):
        first, count = (n * w.length, w.length) if w.length else (w.start[n], w.size[n])
        own, to = w.rows[n] if w.pooled else n, w.rows[n] if w.pooled_end else n
        for s in range(w.S if to >= 0 else 0):
            place, end = count - w.S + s, row(w.end, to * w.S + s)
            if place >= 0:
                copy_row(row(w.x, first + place), end, w.D)
            elif w.has_past and own >= 0:
                copy_row(row(w.past, own * w.S + w.S + place), end, w.D)
            else:
                copy_row(row(w.zeros, 0), end, w.D)


@piece
def ended_vjp(w: Work, begin: Whole, stop: Whole):
    """x and past, which are gradients, += those of `end`."""
    for n in range(begin * w.each, min(stop * w.each, w.N)):
        first, count = (n * w.length, w.length) if w.length else (w.start[n], w.size[n])
        for s in range(w.S):
            place, d = count - w.S + s, row(w.end, n * w.S + s)
            if place >= 0:
                to = row(w.x, first + place)
                over(plus, to, d, d, 0, to)
            elif w.has_past:
                to = row(w.past, n * w.S + w.S + place)
                over(plus, to, d, d, 0, to)


def end_of(
    sequences: Sequences, x: np.ndarray, past: np.ndarray | None, S: int, rows: np.ndarray | None, in_place: bool
) -> np.ndarray:
    """(..., S, D), or (N, S, D); past: the states, or a pool of them with `rows`; in_place: written there."""
    lead = x.shape[:-2] if sequences.offsets is None else (len(sequences.offsets) - 1,)
    end = past if in_place else empty((*lead, S, x.shape[-1]), x.dtype)
    assert end is not None  # in_place has one
    if end.size:
        _run(ended, sequences, (x, past, end), rows, pooled_end=in_place and rows is not None)
    return end


def add_end_vjp(sequences: Sequences, dx: np.ndarray, dpast: np.ndarray | None, dend: np.ndarray) -> None:
    """dx, dpast += the gradients of `end_of`, in C order."""
    if dend.size:
        _run(ended_vjp, sequences, (dx, dpast, dense(dend, dx.dtype)), None, pooled_end=False)


def _run(kernel: Any, sequences: Sequences, arrays: Any, rows: np.ndarray | None, pooled_end: bool) -> None:
    x, past, end = arrays
    D, S, dtype = x.shape[-1], end.shape[-2], x.dtype
    none = constant_zeros(np, (1, D), dtype, "cpu")
    held = {"x": rows_of(x, D), "end": end.reshape(-1, D), "zeros": none,
            "past": none if past is None else dense(past, dtype).reshape(-1, D)}  # fmt: skip
    sizes = {"D": D, "S": S, "one": 1, "count": x.size // D, "places": len(held["past"]), "ends": len(held["end"]),
             "has_past": int(past is not None), "pooled": int(rows is not None), "pooled_end": int(pooled_end),
             "each": max(BLOCK // (S * D), 1)}  # fmt: skip
    if sequences.offsets is None:
        sizes |= {"length": x.shape[-2], "N": sizes["count"] // x.shape[-2]}
    else:
        *_, start, size = map(constant, table(sequences.offsets))
        held |= {"start": start, "size": size}
        sizes |= {"length": 0, "N": len(start)}
    if rows is not None:
        held["rows"] = constant(np.ascontiguousarray(rows, np.int64))
    over_matrices(kernel, STATES, sizes | held, -(-sizes["N"] // sizes["each"]), dtype.name)
