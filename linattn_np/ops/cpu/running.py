"""Sums over the tokens of a sequence up to each one, or from each one on, in compiled loops."""

from __future__ import annotations

import numpy as np

from ...runtime.pieces.memory import working
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
from .row_norms import plus

BLOCK = 2**15  # numbers of a task
SUMS = Workspace("running", ("D", "each", "length", "back"), (), (), {"given": {
    "x": Field("count", "D"), "out": Field("count", "D"),
    "start": Field("N", dtype="int64"), "size": Field("N", dtype="int64")}})  # fmt: skip
Work = workspace_kind(SUMS)


@piece
def running(w: Work, begin: Whole, stop: Whole):
    """out_t = x_t + out_{t-1}, or out_{t+1}, of tasks begin..stop of `each` sequences."""
    step = -1 if w.back else 1
    for n in range(begin * w.each, min(stop * w.each, w.N)):
        first, count = (n * w.length, w.length) if w.length else (w.start[n], w.size[n])
        for i in range(count):
            t = first + (count - 1 - i if w.back else i)
            x, out = row(w.x, t), row(w.out, t)
            if i == 0:
                copy_row(x, out, w.D)
            else:
                over(plus, x, row(w.out, t - step), x, 0, out)


def over_tokens(sequences: Sequences, x: np.ndarray, axes: int, reverse: bool) -> np.ndarray:
    """Running sums of x (..., T, ...), not empty, over its tokens; axes: how many follow them."""
    lead = x.shape[: x.ndim - axes]
    D, T, N = x.size // int(np.prod(lead)), lead[-1], int(np.prod(lead[:-1]))
    out, held = working(x.shape, x.dtype), {"x": dense(x, x.dtype).reshape(-1, D)}
    sizes = {"D": D, "count": N * T, "back": int(reverse), "length": T, "N": N}
    if sequences.offsets is not None:
        *_, start, size = map(constant, table(sequences.offsets))
        held |= {"start": start, "size": size}
        sizes |= {"length": 0, "N": len(start)}
    each = max(BLOCK * sizes["N"] // x.size, 1)
    over_matrices(running, SUMS, sizes | held | {"out": out.reshape(-1, D), "each": each}, -(-sizes["N"] // each),
                  x.dtype.name)  # fmt: skip
    return out
