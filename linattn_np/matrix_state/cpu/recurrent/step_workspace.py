"""What the kernel of the recurrent form is told, and its matrices: vectors of a slab of tokens, a block of state."""

from __future__ import annotations

import functools

import numpy as np

from ....runtime.pieces.passes import WIDE
from ....runtime.pieces.piece import workspace_kind
from ....runtime.pieces.tiles import lane
from ....runtime.pieces.workspace import ARRAY, Layout, Matrix, Workspace
from ...types import Decay, Erase, Inputs, Plan, ReadState
from ..table import is_direct
from ..workspace import ARRAYS, DELTA, FREE, SCALAR, TASK, VECTOR

M = Matrix
MATRICES = {
    "sequences": M("sequence_count", "inputs", dtype="int64"), "own": M("own_count", dtype="int64"),
    "sources": M("source_count", dtype="int64"), "extents": M("handle_count", "two", dtype="int64"),
    "keys": M("c", "K_lanes"), "reads": M("c", "K_lanes"),  # reads: r e^g or a
    "pushes": M("c", "K_lanes"), "decays": M("c", "K_lanes"),  # decays: e^g, or its first column
    "query": M("c_queries", "K_lanes"), "nobody": M("K_lanes"), "u": M("K_lanes"), "predicted_weights": M("K_lanes"),
    "beta": M("c"), "numbers": M("c"), "bonuses": M("c_queries"), "scales": M("one"), "packed": M("K", "block"),
    "values": M("block"), "values_own": M("block"), "written": M("block"), "predicted": M("block"), "seen": M("block"),
    "fade": M("c", "block"),
}  # fmt: skip
WHOLES = ("K", "K_lanes", "V", "V_all", "H", "queries", "columns", "blocks", "block", "decay", "erase", "query_reads",
          "erase_reads", "own_read", "asked", "bonus", "fades", "started", "direct", "batch", "head", "t", "c",
          "c_queries", "i", "last", "q_row", "column", "wide", "following", "lane", "one", "two",
          "from_state", "to_state", "direct_v", "inputs", "sequence_count", "own_count",
          "source_count", "handle_count", "read_count")  # fmt: skip
STEPS = Workspace("steps", WHOLES, ("scale",), ARRAYS, MATRICES)
Steps = workspace_kind(STEPS)
SIZE = STEPS.size
VALUES = STEPS.slots["values"]
TABLE_BYTES = -(-SIZE * 8 // 64) * 64
FIRST = STEPS.slots[ARRAYS[0]]
ARRAY_SLOTS = (FIRST, ARRAY)  # where arrays begin in the table, and entries of each


def sizes(x: Inputs, plan: Plan, state: np.ndarray | None, columns: int) -> dict[str, int]:
    """The sizes and kinds of a call."""
    H, K, V, dtype = x.v.shape[-2], x.k.shape[-1], x.v.shape[-1], np.dtype(plan.dtype)
    direct = state is not None and state.dtype == dtype and state.strides[-1] == dtype.itemsize
    return {
        "K": K, "V_all": V, "H": H, "queries": 1 if x.q is None else max(1, x.q.shape[-2] // H), "columns": columns,
        "blocks": -(-V // columns), "decay": {Decay.NONE: 0, Decay.SCALAR: SCALAR, Decay.VECTOR: VECTOR}[x.decay],
        "erase": {Erase.NONE: 0, Erase.DELTA: DELTA, Erase.FREE: FREE}[x.erase],
        "query_reads": plan.query_reads is ReadState.PREVIOUS,
        "erase_reads": x.erase is Erase.FREE or plan.erase_reads is ReadState.PREVIOUS,
        "own_read": x.erase is Erase.FREE or not plan.erases_key, "asked": x.q is not None, "bonus": x.u is not None,
        "fades": x.gv is not None, "started": state is not None, "direct": direct,
        "direct_v": is_direct(x.v, dtype),
    }  # fmt: skip


@functools.lru_cache(maxsize=64)
def layout(K: int, queries: int, tokens: int, dtype: str) -> Layout:
    """The table of a kernel whose slabs have so many tokens."""
    W = lane(dtype)
    most = {"c": tokens, "c_queries": tokens * queries, "K": K, "K_lanes": -(-K // W) * W, "block": WIDE * W, "one": 1,
            "two": 2, "inputs": len(TASK), "sequence_count": 0, "own_count": 0, "source_count": 0, "handle_count": 0,
            "lane": W}  # fmt: skip
    outside = ("sequences", "own", "sources", "extents")
    return STEPS.layout(most, np.dtype(dtype).itemsize, W, lambda f: int(f not in outside))

