"""What the kernels are told, and their memory: a block of c queries against a block of n keys."""

from __future__ import annotations

from ...runtime.pieces.piece import workspace_kind
from ...runtime.pieces.workspace import Matrix as M
from ...runtime.pieces.workspace import Workspace

TASK = ("BATCH", "ROW", "FIRST", "T", "HEAD", "FROM", "TO")  # tokens FIRST .. FIRST + T, queries FROM .. TO of them
SIZES = ("c", "n", "C", "N", "K", "K_lanes", "V", "V_lanes", "L", "i", "j", "h", "tokens", "blocks", "tiles", "tile",
         "tasks_count", "task_fields")  # fmt: skip
FLAGS = ("causal", "window", "gated", "sinks", "normalize", "strict", "heads", "is_past", "is_diagonal")
NUMBERS = ("scale", "between", "reach")
ARRAYS = ("in_q", "in_k", "in_v", "in_g", "in_sinks", "past_k", "past_v", "past_b", "past_age", "out", "most", "sums",
          "in_dout", "out_dq", "out_dk", "out_dv", "out_dg", "past_dk", "past_dv", "past_db", "in_rhs", "in_beta",
          "in_du", "out_dbeta")  # fmt: skip
MATRICES = {
    "tasks": M("tasks_count", "task_fields", dtype="int64"),
    "q": M("c", "K_lanes"), "k": M("n", "K_lanes"), "v": M("n", "V_lanes"), "kT": M("K_lanes", "n"), "Z": M("c", "n"),
    "O": M("c", "V_lanes"), "m": M("c"), "l": M("c"), "fade": M("c"), "one": M("C"),
    "g": M("c"), "g_n": M("n"), "start": M("c"), "end": M("n"), "D": M("c", "c"), "age": M("n"),
    # the adjoint
    "vT": M("V_lanes", "n"), "dout": M("c", "V_lanes"), "log": M("c"), "delta": M("tokens"), "scales": M("c"),
    "dZ": M("c", "n"), "dK": M("n", "K_lanes"), "dV": M("n", "V_lanes"), "columns": M("n"), "below": M("n"),
    "readers": M("tokens"), "dg": M("tokens"), "totals": M("blocks"), "crossed": M("blocks"),
    # stick-breaking: keys are rows
    "qT": M("K_lanes", "c"), "A": M("n", "c"), "doutT": M("V_lanes", "c"), "dA": M("n", "c"), "run": M("c"),
    "S": M("n", "c", slot="tile"), "G": M("n", "c", slot="tile"),
    # the linear system of deltaformer
    "B": M("c", "n"), "rhs": M("c", "V_lanes"), "beta": M("c"),
}  # fmt: skip
FORWARD = frozenset(("q", "k", "v", "kT", "Z", "O", "m", "l", "fade", "one", "age"))
GATES = frozenset(("g", "g_n", "start", "end", "D"))
ADJOINT = frozenset(("vT", "dout", "log", "delta", "scales", "dZ", "dK", "dV"))
GATES_ADJOINT = frozenset(("columns", "below", "readers", "dg", "totals", "crossed"))
SYSTEM = frozenset(("B", "rhs", "beta"))
STICK = frozenset(("q", "k", "v", "O", "m", "one", "qT", "A", "run", "age"))
TILES = frozenset(("S", "G"))
STICK_ADJOINT = STICK | TILES | frozenset(("dout", "doutT", "dA", "scales"))
MEMORY = {"forward": FORWARD, "backward": FORWARD | ADJOINT, "delta": FORWARD | SYSTEM,
          "delta_vjp": FORWARD | ADJOINT | SYSTEM, "stick": STICK, "stick_vjp": STICK_ADJOINT}  # of each kernel

ATTENTION = Workspace("attention", (*TASK, *SIZES, *FLAGS), NUMBERS, ARRAYS, MATRICES)
Work = workspace_kind(ATTENTION)
