"""What the kernel of the recurrent form is told, and its matrices: vectors of a slab of tokens, a block of state."""

from __future__ import annotations

import functools

import numpy as np

from ....ops.cpu.maps import MONOMIALS
from ....runtime.pieces.passes import WIDE
from ....runtime.pieces.piece import workspace_kind
from ....runtime.pieces.vectors import lane
from ....runtime.pieces.workspace import ARRAY, Layout, Matrix, Workspace, up
from ...policy import FEATURE_HEADS
from ...types import Decay, Erase, Inputs, Plan, ReadState
from ..chunks import key_width
from ..layout import Features, map_sizes
from ..table import is_direct
from ..workspace import ARRAYS, DELTA, FREE, SCALAR, TASK, VECTOR

M = Matrix
MATRICES = {
    "given": {"sequences": M("sequence_count", "inputs", dtype="int64"), "own": M("own_count", dtype="int64"),
              "sources": M("source_count", dtype="int64"), "extents": M("handle_count", "two", dtype="int64")},
    "": {
        "keys": M("c", "K_lanes"), "reads": M("c", "K_lanes"),  # reads: r e^g or a
        "pushes": M("c", "K_lanes"), "decays": M("c", "K_lanes"),  # decays: e^g, or its first column
        "query": M("c_queries", "K_lanes"), "nobody": M("K_lanes"), "u": M("K_lanes"),
        "predicted_weights": M("K_lanes"), "beta": M("c"), "numbers": M("c"), "bonuses": M("c_queries"),
        "scales": M("one"), "packed": M("K", "block"), "values": M("block"), "values_own": M("block"),
        "written": M("block"), "predicted": M("block"), "seen": M("block"), "fade": M("c", "block"),
        "rotation": M("two", "pairs"),
    },
    "map": {  # rows as they are given, all monomials, lengths
        "x": M("c_rows", "given_wide"), "phi": M("c_rows", "phi_lanes"), "over": M("c_rows"),
        "angle": M("c_rows", "half_lanes"), "mapped": M("c_rows", "K_lanes"), "map_numbers": M("number_count"),
        "map_weights": M("number_count", alias="map_numbers", first=1),
    },
    "averaged": {"z": M("K_lanes"), "averages": M("c_queries")},
}  # fmt: skip
WHOLES = ("K", "K_lanes", "V", "V_all", "H", "queries", "columns", "blocks", "block", "decay", "erase", "query_reads",
          "erase_reads", "separate_erase_key", "has_queries", "bonus", "fades", "started", "direct", "batch", "head",
          "t", "c", "c_queries", "c_rows", "i", "last", "q_row", "column", "wide", "following", "lane", "one", "two",
          "from_state", "to_state", "direct_v", "inputs", "sequence_count", "own_count",
          "source_count", "handle_count", "read_count", "given", "given_wide", "half", "half_lanes", "phi_lanes",
          "skipped", "number_count", "segment_count", "map", "averaged", "stop",
          "rotates", "pairs", "group", "known", "known_batch", "known_head", "known_t")  # fmt: skip
STEPS = Workspace("steps", WHOLES, ("scale", "eps"), ARRAYS, MATRICES)
Steps = workspace_kind(STEPS)
SIZE = STEPS.size
VALUES = STEPS.slots["values"]
TABLE_BYTES = up(SIZE * 8, 64)
FIRST = STEPS.slots[ARRAYS[0]]
ARRAY_SLOTS = (FIRST, ARRAY)  # where arrays begin in the table, and entries of each


def sizes(x: Inputs, plan: Plan, state: np.ndarray | None, columns: int) -> dict[str, int]:
    """The sizes and kinds of a call."""
    H, K, V, dtype = x.v.shape[-2], key_width(x, plan), x.v.shape[-1], np.dtype(plan.dtype)
    direct = state is not None and state.dtype == dtype and state.strides[-1] == dtype.itemsize
    return {
        "K": K, "V_all": V, "H": H, "queries": 1 if x.q is None else max(1, x.q.shape[-2] // H), "columns": columns,
        "blocks": -(-V // columns), "decay": {Decay.NONE: 0, Decay.SCALAR: SCALAR, Decay.VECTOR: VECTOR}[x.decay],
        "erase": {Erase.NONE: 0, Erase.DELTA: DELTA, Erase.FREE: FREE}[x.erase],
        "query_reads": plan.query_reads is ReadState.PREVIOUS,
        "erase_reads": x.erase is Erase.FREE or plan.erase_reads is ReadState.PREVIOUS,
        "separate_erase_key": x.erase is Erase.FREE or not plan.erases_key, "has_queries": x.q is not None,
        "bonus": x.u is not None,
        "fades": x.gv is not None, "started": state is not None, "direct": direct,
        "direct_v": is_direct(x.v, dtype), "averaged": plan.average is not None, "rotates": 0, "pairs": 0,
    }  # fmt: skip


@functools.lru_cache(maxsize=64)
def layout(
    K: int, queries: int, tokens: int, dtype: str, features: Features | None = None, averaged: bool = False
) -> Layout:
    """The table of a kernel whose slabs have so many tokens."""
    W = lane(dtype)
    most = {"c": tokens, "c_queries": tokens * queries, "c_rows": tokens * (1 + queries), "K": K,
            "K_lanes": up(K, W), "block": WIDE * W, "one": 1, "two": 2, "pairs": up(K, W),
            "inputs": len(TASK), "lane": W}  # fmt: skip
    if features is not None:
        found = map_sizes(K, features, W)
        grouped = tokens == 1 and found["map"] != MONOMIALS
        most["group"] = FEATURE_HEADS if grouped else 1
        most["c_rows"] *= most["group"]
        most |= {"number_count": found.pop("numbers")} | found
    words = {"map"} if features is not None else set()
    return STEPS.layout(most, dtype, frozenset(words | ({"averaged"} if averaged else set())))
