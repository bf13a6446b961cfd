"""Results stored in 16 bits: rounded from float32 to nearest even."""

from __future__ import annotations

import numpy as np

from ...runtime.arrays import dtype_name
from ...runtime.pieces.memory import address, empty
from ...runtime.pieces.piece import Whole, piece, workspace_kind
from ...runtime.pieces.run import over_matrices
from ...runtime.pieces.workspace import Matrix, Workspace
from .storage import to_bfloat16, to_float16

NUMBERS = Workspace("numbers", ("count", "brain"), (), (), {"given": {
    "x": Matrix("count", dtype="uint32"), "out": Matrix("count", dtype="uint16")}})  # fmt: skip
Work = workspace_kind(NUMBERS)


@piece
def rounded(w: Work, first: Whole, last: Whole):
    """out = x, in bfloat16 or in float16."""
    if w.brain:
        to_bfloat16(w.x, w.out)
    else:
        to_float16(w.x, w.out)


def put(to: np.ndarray, x: np.ndarray) -> None:
    """to[...] = x, of one shape."""
    name = dtype_name(to)
    dense = to.flags.c_contiguous and x.flags.c_contiguous and to.shape == x.shape and address(to) % 2 == 0
    if name not in ("bfloat16", "float16") or x.dtype != np.float32 or not dense:
        to[...] = x
        return
    values = {"count": x.size, "brain": name == "bfloat16", "x": x, "out": to}
    over_matrices(rounded, NUMBERS, values, 1, "float32")


def cast(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """x in a dtype, in the order of its axes."""
    to = empty(x.shape, dtype)
    put(to, x)
    return to
