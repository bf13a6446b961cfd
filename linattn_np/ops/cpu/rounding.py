"""Results stored in 16 bits: rounded from float32 to nearest even."""

from __future__ import annotations

import numpy as np

from ...runtime.arrays import dtype_name
from ...runtime.pieces.memory import address, empty
from ...runtime.pieces.piece import load_pieces, piece, workspace_kind
from ...runtime.pieces.run import call_of
from ...runtime.pieces.run import put as fill
from ...runtime.pieces.workspace import Matrix, Workspace
from .storage import to_bfloat16, to_float16

NUMBERS = Workspace("numbers", ("count",), (), (), {"given": {
    "x": Matrix("count", dtype="uint32"), "out": Matrix("count", dtype="uint16")}})  # fmt: skip
Work = workspace_kind(NUMBERS)


@piece
def round_bfloat16(w: Work):
    """out = x"""
    to_bfloat16(w.x, w.out)


@piece
def round_float16(w: Work):
    """out = x"""
    to_float16(w.x, w.out)


ROUNDED = {"bfloat16": round_bfloat16, "float16": round_float16}


def put(to: np.ndarray, x: np.ndarray) -> None:
    """to[...] = x, of one shape."""
    kernel = ROUNDED.get(dtype_name(to))
    if kernel is None or x.dtype != np.float32 or not (to.flags.c_contiguous and x.flags.c_contiguous) or (
        to.shape != x.shape or address(to) % 2):  # fmt: skip
        to[...] = x
        return
    load_pieces((kernel,), "float32")
    table = fill(NUMBERS, np.zeros(NUMBERS.size, np.int64), {"count": x.size, "x": x, "out": to})
    call_of(kernel, NUMBERS, "float32")(table)


def cast(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """x in a dtype, in the order of its axes."""
    to = empty(x.shape, dtype)
    put(to, x)
    return to
