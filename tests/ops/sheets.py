"""Matrices in memory full of NaN, for pieces of compiled loops alone."""

from __future__ import annotations

import numpy as np

from linattn_np.runtime.pieces.memory import address
from linattn_np.runtime.pieces.piece import JIT, entry, load_pieces, workspace_kind
from linattn_np.runtime.pieces.workspace import Matrix, PythonWorkspace, Workspace

M = Matrix
SIZES = ("m", "n", "k", "how")
SHEET = Workspace("sheet", SIZES, ("x",), (), {"": {
    "A": M("m", "k"), "B": M("k", "n"), "C": M("m", "n"), "D": M("m", "n"), "N": M("m", "m"), "P": M("m", "m"),
    "T": M("n", "m"), "X": M("m", "k"), "f": M("m"), "h": M("m"),
}})  # fmt: skip
Sheet = workspace_kind(SHEET)


def run(kernel, dtype, sizes, x=0.0, **given):
    """The sheet after a kernel; `given` are its matrices, the others are NaN."""
    dtype = np.dtype(dtype)
    known = {"m": 1, "n": 1, "k": 1, "how": 0} | sizes
    table, own, size = SHEET.layout(known, dtype)
    memory = np.full(size + 64, 0xFF, np.uint8)  # NaN
    table[own] += -(-address(memory) // 64) * 64
    w = PythonWorkspace(SHEET, table, dtype)
    w.x = x
    for name, y in given.items():
        getattr(w, name)[...] = y
    load_pieces((kernel,), dtype.name)
    if JIT:
        entry(kernel, dtype.name)(address(table))
    else:
        kernel(w)
    w.__dict__["owner"] = memory
    return w


def close(x, y, dtype, factor=64):
    np.testing.assert_allclose(x, y, rtol=0, atol=factor * np.finfo(dtype).eps * max(1, np.abs(y).max(initial=0)))
