"""What the loops of a StateLog work on: the arrays of a call, the logs and the pool, and a thread's own memory."""

from __future__ import annotations

from ..runtime.pieces.piece import workspace_kind
from ..runtime.pieces.workspace import Matrix as Field
from ..runtime.pieces.workspace import Workspace

LOG = Workspace(
    "state_log",
    ("R", "H", "N", "T", "t", "slots", "ring", "queries", "erases", "updated", "early", "bonuses",
     "bits", "unpacked", "writes_state",  # of a small state, else 0; whether held has all of it; whether it is stored
     "r", "h", "n", "place", "depth", "base"),  # of a task: row, head, token; its row of arrays, its path, its state
    ("scale",),
    (),
    {
        "given": {
            "S": Field("states", "V"),  # (rows of a pool, H, K); or a SmallState
            "whole": Field("states", "V", dtype="int16"), "upper": Field("states", "V", dtype="int8"),
            "low": Field("states", "half", dtype="uint8"), "scales": Field("heads", "V", dtype="float32"),
            "wrong": Field("R", dtype="int64"),  # rows whose states are not finite
            # of the logs, (rows, H, slots)
            "log_k": Field("logged", "K"), "log_u": Field("logged", "V"), "log_g": Field("logged", "W"),
            "q": Field("asked", "K"), "out": Field("asked", "V"),  # (R, T, H, queries)
            "k": Field("given", "K"), "v": Field("given", "V"), "g": Field("given", "W"),  # (R, T, H)
            "erase": Field("given", "K"), "beta": Field("given"), "bonus": Field("H", "K"),
            "at": Field("R", dtype="int64"), "state": Field("R", dtype="int64"),  # rows of the log, and of S
            "start": Field("R", dtype="int64"), "live": Field("R", dtype="int64"),
            "parents": Field("R", "N", dtype="int64"), "to": Field("R", "N", dtype="int64"),  # slots of the tokens
        },
        "": {
            "path": Field("longest", dtype="int64"), "total": Field("W"), "fade": Field("K"),
            "faded": Field("longest", "K"), "readers": Field("most", "K"), "found": Field("most", "V"),
            "writes": Field("longest", "V"), "held": Field("held_rows", "held_columns"),
        },
    },
)  # fmt: skip
Work = workspace_kind(LOG)
