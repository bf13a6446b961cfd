"""Arguments and memory of the kernels: a block of c queries against a block of n keys."""

from __future__ import annotations

from ...runtime.pieces.piece import workspace_kind
from ...runtime.pieces.workspace import Matrix as M
from ...runtime.pieces.workspace import Workspace

TASK = ("BATCH", "ROW", "FIRST", "T", "HEAD", "FROM", "TO", "MAPS")
# tokens FIRST .. FIRST + T, queries FROM .. TO of them; MAPS: the first row of in_R
SIZES = ("c", "n", "C", "N", "K", "K_lanes", "V", "V_lanes", "L", "i", "j", "h", "tokens", "blocks", "tiles", "tile",
         "tasks_count", "task_fields")  # fmt: skip
FLAGS = ("causal", "window", "gated", "sinks", "normalize", "biased", "strict", "heads", "is_past", "is_diagonal",
         "mapped", "lse")  # fmt: skip
NUMBERS = ("scale", "between", "reach", "crossing", "passed")
ARRAYS = ("in_q", "in_k", "in_v", "in_g", "in_sinks", "past_k", "past_v", "past_b", "past_length", "out", "logs",
          "in_dout", "out_dq", "out_dk", "out_dv", "out_dg", "past_dk", "past_dv", "past_db", "in_rhs", "in_beta",
          "in_du", "out_dbeta", "in_bias", "out_dbias", "out_dsinks", "in_dlse",
          "end_k", "end_v", "end_b", "end_length",
          # of PaTH: q at the start and k at the end of their blocks, -E, X, R, w, -U (path.py), and their gradients
          "in_start", "in_end", "in_E", "in_X", "in_R", "in_w", "in_U",
          "out_start", "out_end", "out_E", "out_X", "out_R")  # fmt: skip
MATRICES = {  # by the kind of call
    "given": {"tasks": M("tasks_count", "task_fields", dtype="int64")},
    "": {"q": M("c", "K_lanes"), "k": M("n", "K_lanes"), "v": M("n", "V_lanes"), "kT": M("K_lanes", "n"),
         "Z": M("c", "n"), "O": M("c", "V_lanes"), "m": M("c"), "l": M("c"), "fade": M("c"), "one": M("C"),
         "age": M("n")},
    "gated": {"g": M("c"), "g_n": M("n"), "start": M("c"), "end": M("n"), "D": M("c", "c")},
    "adjoint": {"vT": M("V_lanes", "n"), "dout": M("c", "V_lanes"), "log": M("c"), "delta": M("tokens"),
                "scales": M("c"), "dZ": M("c", "n"), "dK": M("n", "K_lanes"), "dV": M("n", "V_lanes")},
    "gated adjoint": {"columns": M("n"), "below": M("n"), "readers": M("tokens"), "dg": M("tokens"),
                      "totals": M("blocks"), "crossed": M("blocks")},
    "biased": {"P": M("c", "n")},
    # stick-breaking: keys are rows
    "stick": {"qT": M("K_lanes", "c"), "A": M("n", "c"), "run": M("c")},
    "stick adjoint": {"doutT": M("V_lanes", "c"), "dA": M("n", "c"), "S": M("n", "c", slot="tile"),
                      "complement": M("n", "c", slot="tile"), "G": M("n", "c", slot="tile")},
    # the linear system of deltaformer
    "strict": {"B": M("c", "n"), "rhs": M("c", "V_lanes"), "beta": M("c")},
    # PaTH: y is the next q; q and dq as they met each block of keys, a block after the other
    "mapped": {"E": M("c", "c"), "X": M("c", "c"), "R": M("K_lanes", "K_lanes"), "y": M("c", "K_lanes")},
    "mapped adjoint": {"XT": M("c", "c"), "RT": M("K_lanes", "K_lanes"), "mapped_q": M("tokens", "K_lanes"),
                       "mapped_dq": M("tokens", "K_lanes"), "dq": M("c", "K_lanes"), "writers": M("tokens")},
}  # fmt: skip

ATTENTION = Workspace("attention", (*TASK, *SIZES, *FLAGS), NUMBERS, ARRAYS, MATRICES)
Work = workspace_kind(ATTENTION)
