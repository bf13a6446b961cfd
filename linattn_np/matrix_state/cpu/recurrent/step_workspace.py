"""What the kernel of the recurrent form is told, and its matrices: vectors of a slab of tokens, a block of state."""

from __future__ import annotations

import functools

from ....ops.cpu.maps import MONOMIALS
from ....runtime.pieces.passes import WIDE
from ....runtime.pieces.piece import workspace_kind
from ....runtime.pieces.vectors import lane
from ....runtime.pieces.workspace import ARRAY, Layout, Matrix, Workspace, up
from ...policy import FEATURE_HEADS
from ..layout import Cell, flags, map_sizes, words_of
from ..workspace import ARRAYS, TASK

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
WHOLES = ("V", "V_all", "H", "queries", "columns", "blocks", "decay", "erase", "query_reads", "erase_reads",
          "separate_erase_key", "has_queries", "bonus", "value_decay", "started", "direct", "batch", "head", "t", "i",
          "last", "q_row", "column", "wide", "following", "lane", "from_state", "to_state", "direct_v", "read_count",
          "given", "half", "skipped", "segment_count", "map", "averaged", "stop", "rotates", "group", "known",
          "known_batch", "known_head", "known_t")  # fmt: skip
STEPS = Workspace("steps", WHOLES, ("scale", "eps"), ARRAYS, MATRICES)
Steps = workspace_kind(STEPS)
SIZE = STEPS.size
VALUES = STEPS.slots["values"]
TABLE_BYTES = up(SIZE * 8, 64)
FIRST = STEPS.slots[ARRAYS[0]]
ARRAY_SLOTS = (FIRST, ARRAY)  # where arrays begin in the table, and entries of each


@functools.lru_cache(maxsize=64)
def layout(cell: Cell, tokens: int) -> Layout:
    """The table of a kernel whose slabs have so many tokens."""
    W, K = lane(cell.dtype), cell.K
    most = {"c": tokens, "c_queries": tokens * cell.queries, "c_rows": tokens * (1 + cell.queries), "K": K,
            "K_lanes": up(K, W), "block": WIDE * W, "one": 1, "two": 2, "pairs": up(K, W),
            "inputs": len(TASK), "lane": W}  # fmt: skip
    if cell.features is not None:
        found = map_sizes(K, cell.features, W)
        grouped = tokens == 1 and found["map"] != MONOMIALS
        most["group"] = FEATURE_HEADS if grouped else 1
        most["c_rows"] *= most["group"]
        most |= {"number_count": found.pop("numbers")} | found
    most |= {name: x for name, x in flags(cell).items() if name in STEPS.wholes and name not in most}
    return STEPS.layout(most, cell.dtype, words_of(cell))
