"""Arguments and memory of the kernels: n tokens of one head, D channels of a key, and a 1 with a bias.

With a hidden layer k and q are its rows: the last layer is a linear learner of them. x and xq are then the keys and
queries, X_D channels with that of a bias, and the matrices of the first layer end in 1.
"""

from __future__ import annotations

from ...runtime.pieces.piece import workspace_kind
from ...runtime.pieces.workspace import Matrix as M
from ...runtime.pieces.workspace import Workspace

TASK = ("BATCH", "HEAD", "PLACE")  # PLACE: of the head among all states
TILE = ("START", "n", "CLOSES")  # CLOSES: the mini-batch ends
FLAGS = ("biased", "normed", "squared", "has_q", "has_dout", "momentum", "gain", "keep", "exact", "hidden")
ARRAYS = ("in_q", "in_k", "in_v", "out", "in_dout", "out_dq", "out_dk", "out_dv")
BASES = {f"{name}_{x}": M(f"{name}_rows", "V") for name in ("first", "marks", "last") for x in "WSA"}
BASES1 = {f"{name}_{x}1": M(f"{name}1_rows", "M") for name in ("first", "marks", "last") for x in "WSA"}
SQUARE, KEY, VALUE, STATE = M("n", "n"), M("n", "D"), M("n", "V"), M("D", "V")
X_KEY, HIDDEN, STATE1 = M("n", "X_D"), M("n", "M"), M("X_D", "M")
MATRICES = {
    "given": {"tasks": M("tasks_count", "task_fields", dtype="int64"),
              "spans": M("tiles", "tile_fields", dtype="int64"),
              "masks": M("mask_rows", "N"), "c": M("mask_rows", "B"), "gains": M("places"),
              "weights": M("H", "V"), "shifts": M("H", "V"), **BASES, **BASES1},
    "hidden": {"x": X_KEY, "xq": X_KEY, "xT": M("X_D", "n"), "y": HIDDEN, "yq": HIDDEN, "s": HIDDEN, "R1": HIDDEN,
               "u": KEY, "to_u": M("V", "D"), "W1": STATE1, "S1": STATE1, "A1": STATE1, "Y1": STATE1},
    "hidden adjoint": {"dx": X_KEY, "dxq": X_KEY, "dy": HIDDEN, "ds": HIDDEN, "T1": HIDDEN, "du": KEY,
                       "sT": M("M", "n"), "back1": M("M", "X_D"), "dW1": STATE1, "dS1": STATE1, "dA1": STATE1,
                       "nW1": STATE1, "nS1": STATE1, "nA1": STATE1},
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
SIZES = ("N", "D", "K", "V", "M", "X_D", "H", "B", "tiles", "tile", "t", "place", "mask_row", "block", "states",
         "places", "tasks_count", "task_fields", "tile_fields")  # fmt: skip
LEARNER = Workspace("learner", (*TASK, *TILE, *SIZES, *FLAGS), ("eps",), ARRAYS, MATRICES)
Work = workspace_kind(LEARNER)
