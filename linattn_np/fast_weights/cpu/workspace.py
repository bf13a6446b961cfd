"""Arguments and memory of the kernels: n tokens of one head, D channels of a key, and a 1 with a bias."""

from __future__ import annotations

from ...runtime.pieces.piece import workspace_kind
from ...runtime.pieces.workspace import Matrix as M
from ...runtime.pieces.workspace import Workspace

TASK = ("BATCH", "HEAD", "PLACE")  # PLACE: of the head among all states
TILE = ("START", "n", "CLOSES")  # CLOSES: the mini-batch ends
FLAGS = ("biased", "normed", "squared", "has_q", "has_dout", "momentum", "gain", "keep", "exact")
ARRAYS = ("in_q", "in_k", "in_v", "out", "in_dout", "out_dq", "out_dk", "out_dv")
BASES = {f"{name}_{x}": M(f"{name}_rows", "V") for name in ("first", "marks", "last") for x in "WSA"}
SQUARE, KEY, VALUE, STATE = M("n", "n"), M("n", "D"), M("n", "V"), M("D", "V")
MATRICES = {
    "given": {"tasks": M("tasks_count", "task_fields", dtype="int64"),
              "spans": M("tiles", "tile_fields", dtype="int64"),
              "masks": M("mask_rows", "N"), "c": M("mask_rows", "B"), "gains": M("places"),
              "weights": M("H", "V"), "shifts": M("H", "V"), **BASES},
    "": {"k": KEY, "q": KEY, "kT": M("D", "n"), "v": VALUE, "Z": VALUE, "X": VALUE, "r": VALUE, "R": VALUE, "O": VALUE,
         "P": SQUARE, "L": SQUARE, "over": M("n"),
         "column": M("n"), "a": M("V"), "weight": M("V"), "shift": M("V"),
         "W": STATE, "S": STATE, "A": STATE, "Y": STATE},
    "given adjoint": {"dmasks": M("mask_rows", "N"), "dc": M("mask_rows", "B"), "dgains": M("places"),
                      "dweights": M("states", "V"), "dshifts": M("states", "V")},
    "adjoint": {"dk": KEY, "dq": KEY, "dout": VALUE, "dr": VALUE, "T": VALUE, "rT": M("V", "n"), "G": SQUARE,
                "XO": VALUE, "over_O": M("n"), "back": M("V", "D"), "dW": STATE, "dS": STATE, "dA": STATE,
                "nW": STATE, "nS": STATE, "nA": STATE, "dweight": M("V"), "dshift": M("V")},
}  # fmt: skip
SIZES = ("N", "D", "K", "V", "H", "B", "tiles", "tile", "t", "place", "mask_row", "block", "states", "places",
         "tasks_count", "task_fields", "tile_fields")  # fmt: skip
LEARNER = Workspace("learner", (*TASK, *TILE, *SIZES, *FLAGS), ("eps",), ARRAYS, MATRICES)
Work = workspace_kind(LEARNER)
