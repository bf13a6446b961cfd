"""The table of a kernel: its fields and matrices, declared once for both forms, and the arrays of a call as its rows.

Sizes: c tokens in the chunk, c1 = c + 1, K and V channels, K_lanes and V_lanes the same in whole vectors. A name with
_before or _after is the same memory one row earlier or later: a reader of S_{t-1} takes decays one token back. In the
recurrent form c tokens are a slab, and width columns, width_lanes in whole vectors, a block of the state.

A kind of call is a set of words: a matrix has memory in the calls whose words it stands under, and words are flags.
"""

from __future__ import annotations

from ...runtime.pieces.piece import workspace_kind
from ...runtime.pieces.workspace import Matrix, Workspace

MONOMIALS, EXPONENTIALS, WAVES = range(1, 4)  # of a feature map; 0: none
EARLY, STRICT = range(1, 3)  # of a gram: it reads S_{t-1}; without the token's own write

TASK = ("BATCH", "FIRST", "STOP", "STATE", "HEAD", "COLUMN", "V", "EARLIER", "LATER", "FROM", "TO", "AT")
SIZES = ("t", "C", "given", "half", "skipped", "segment_count", "group")  # fmt: skip
WORDS = ("decay", "scalar", "vector", "erase", "delta", "free", "query_reads", "erase_reads", "separate_erase_key",
         "has_queries", "bonus", "started", "compensates", "map", "value_decay", "averaged", "formed", "exact",
         "direct_q", "direct_v", "direct", "has_dstate", "apart",
         "normalised", "before_sigmoid", "raw_gate", "bounded", "has_bias", "has_rate", "rotated",
         "weighted", "preceded")  # fmt: skip
FLAGS = ("queries", "reflects", "returning", "iterations", "lane")
TOKENS = ("H", "i", "is_last", "q_row", "column", "width", "wide", "following", "known", "known_batch",
          "known_head", "known_t")  # fmt: skip
NUMBERS = ("scale", "eps", "enough", "root", "strongest", "lower_bound")
ARRAYS = ("in_q", "in_k", "in_v", "in_g", "in_r", "in_beta", "in_b", "in_u", "in_state", "out", "in_dout",
          "in_dstate", "out_dq", "out_dk", "out_dv", "out_dg", "out_dr", "out_dbeta", "out_db", "out_du", "out_dstate",
          "in_gv", "starts", "ends", "out_states", "in_dstates", "in_map", "in_map_T", "in_numbers", "in_segments",
          "out_sums", "out_dgv", "in_A_log", "in_bias", "in_rotation", "in_weight", "in_own", "in_past_k", "in_past_v",
          "out_dangle", "out_dweight", "out_down", "out_dpast_k", "out_dpast_v", "flag")  # fmt: skip

M = Matrix
GROUPS = {  # by the words of the calls that they are of, see forward.cell_of
    "": {"factor": M("c"), "scales": M("c")},
    "chunk": {
        "v": M("c", "V_lanes"), "kT": M("K", "c"),
        # tables of the decay
        "sums": M("c", dtype="float64"), "E": M("c", "c", before="c", slot="slot"),
        "start": M("c1", slot="slot"), "start_after": M("c", slot="slot", alias="start", first=1),
        "end": M("c", slot="slot"), "carry": M("K_lanes", slot="slot"),
        # what is written and read
        "S": M("K", "V_lanes", slot="slot"), "S_after": M("K", "V_lanes", slot="slot_after", alias="S"),
        "P": M("c", "c"), "inside": M("c", "V_lanes"), "decayed": M("c", "K_lanes"), "ones": M("c"), "minus": M("c"),
    },
    "given": {"tasks": M("tasks_count", "task_fields", dtype="int64")},
    "plain chunk": {"q": M("c", "K_lanes"), "k": M("c", "K_lanes", slot="slot")},
    "vector chunk": {
        "W": M("c", "K_lanes"), "first": M("c", "K_lanes", before="c"), "last": M("c", "K_lanes"),
        "near": M("block", "K_lanes"), "far": M("c", "K_lanes"), "farT": M("K", "c"),
    },
    "erase chunk": {"A": M("c", "c", slot="slot")},
    "delta": {"beta": M("c")},
    "delta chunk": {"M": M("c", "c"), "U": M("c", "V_lanes", slot="slot")},
    "U_is_v chunk": {"U": M("c", "V_lanes", alias="v")},
    "weighted": {"weights": M("c"), "owns": M("c")},
    "weighted chunk": {"left": M("c", slot="slot")},
    "weighted adjoint": {"own_shares": M("c"), "dweights": M("c"), "downs": M("c")},
    "unweighted chunk": {"left": M("c", slot="slot", alias="end")},  # of a token's write at the end
    "preceded chunk": {"past_k": M("one", "K_lanes"), "past_v": M("one", "V_lanes")},
    "preceded adjoint": {"dpast_k": M("one", "K_lanes"), "dpast_v": M("one", "V_lanes")},
    "rotated adjoint": {"dangle": M("c", "pairs")},
    "compensates chunk": {"rest": M("c", "c", slot="slot"), "correction": M("c", "V_lanes")},
    "free chunk": {"b": M("c", "K_lanes"), "bT": M("K", "c"), "Y": M("c", "V_lanes", slot="slot")},
    "bonus": {"u": M("one", "K_lanes")},
    "raw_gate": {"bias": M("one", "K_lanes"), "rate": M("one")},
    "bonus adjoint": {"du": M("one", "K_lanes")},
    "adjoint": {
        "dout": M("c", "V_lanes"), "dS": M("K", "V_lanes"), "dyT": M("K", "c"), "ST": M("V", "K"), "UT": M("V", "c"),
        "dU": M("c", "V_lanes"), "dP": M("c", "c"), "crossed": M("c", "c", before="c1"),
        "totals": M("K_lanes"),
    },
    "plain adjoint": {"dq": M("c", "K_lanes"), "dk": M("c", "K_lanes")},
    "scalar adjoint": {"readers": M("c", before="c1"), "writers": M("c")},
    "vector adjoint": {
        "crossed_k": M("c", "K_lanes"), "readers_k": M("c", "K_lanes", before="c1"), "writers_k": M("c", "K_lanes"),
        "scratch": M("scratch_rows", "K_lanes"),
    },
    "erase adjoint": {"dr": M("c", "K_lanes")},
    "delta adjoint": {"dbeta": M("c"), "back": M("c", "K_lanes")},
    "free adjoint": {"dY": M("c", "V_lanes"), "db": M("c", "K_lanes")},
    "map": {"map_numbers": M("numbers"), "map_weights": M("numbers", alias="map_numbers", first=1)},
    "map chunk": {  # q and k are the features of x, phi with those before the first
        "x_q": M("c", "given_wide"), "x_k": M("c", "given_wide", slot="slot"), "phi_q": M("c", "phi_lanes"),
        "phi_k": M("c", "phi_lanes", slot="slot"), "over_q": M("c"), "over_k": M("c", slot="slot"),
        "q": M("c", "K_lanes", alias="phi_q", left="skipped"),
        "k": M("c", "K_lanes", slot="slot", alias="phi_k", left="skipped"),
    },
    "waves chunk": {"angle": M("c", "half_lanes")},
    "map adjoint": {"phi_dq": M("c", "phi_lanes"), "phi_dk": M("c", "phi_lanes"), "dx": M("c", "given_wide"),
                    "row_sums": M("c"), "dq": M("c", "K_lanes", alias="phi_dq", left="skipped"),
                    "dk": M("c", "K_lanes", alias="phi_dk", left="skipped")},
    "separate_erase_key chunk": {"r": M("c", "K_lanes", slot="slot")},
    "r_is_k chunk": {"r": M("c", "K_lanes", slot="slot", alias="k")},
    "solved": {"found": M("c", "K_lanes"), "residual": M("c", "K_lanes"), "direction": M("c", "K_lanes"),
               "times_A": M("c", "K_lanes"), "squares": M("c"), "bounds": M("c"), "ridge": M("c", "K_lanes")},
    "exact": {"upper": M("K", "K_lanes"), "lower": M("K", "K_lanes"), "pivots": M("K", dtype="int64")},
    "averaged": {"z": M("K_lanes", slot="slot")},
    "averaged chunk": {"z_after": M("K_lanes", slot="slot_after", alias="z"), "over": M("c"),
                       "averages": M("c")},
    "averaged adjoint": {"dz": M("K_lanes"), "weights": M("c")},
    "value_decay adjoint": {
        "W_v": M("c", "V_lanes"), "first_v": M("c", "V_lanes", before="c"), "last_v": M("c", "V_lanes"),
        "carry_v": M("V_lanes"), "near_v": M("block", "V_lanes"), "far_v": M("c", "V_lanes"), "farT_v": M("V", "c"),
        "ended": M("c", "V_lanes"), "decayed_dout": M("c", "V_lanes"), "read_v": M("c", "V_lanes"),
        "out_v": M("c", "V_lanes"), "crossed_v": M("c", "V_lanes"), "readers_v": M("c", "V_lanes", before="c1"),
        "writers_v": M("c", "V_lanes"), "totals_v": M("V_lanes"), "scratch_v": M("scratch_rows", "V_lanes"),
    },
    "tokens": {
        "keys": M("c", "K_lanes"), "reads": M("c", "K_lanes"),  # reads: r e^g or a
        "pushes": M("c", "K_lanes"), "decays": M("c", "K_lanes"),  # decays: e^g of each channel
        "query": M("c_queries", "K_lanes"), "nobody": M("K_lanes"), "predicted_weights": M("K_lanes"),
        "bonuses": M("c_queries"), "packed": M("K", "width_lanes"), "values": M("width_lanes"),
        "written": M("width_lanes"), "predicted": M("width_lanes"),
        "seen": M("width_lanes"), "fade": M("c", "width_lanes"),
    },
    "map tokens": {  # rows as they are given, all monomials, lengths
        "x": M("c_rows", "given_wide"), "phi": M("c_rows", "phi_lanes"), "lengths": M("c_rows"),
        "angles": M("c_rows", "half_lanes"), "mapped": M("c_rows", "K_lanes"),
    },
    "averaged tokens": {"shares": M("c_queries"), "query_sums": M("queries", "c")},
}  # fmt: skip

WORK = Workspace("work", (*TASK, *SIZES, *WORDS, *FLAGS, *TOKENS), NUMBERS, ARRAYS, GROUPS)
Work = workspace_kind(WORK)
# matrices that may be rows of the call's arrays
Q, V, U = (WORK.slots[name] for name in ("q", "v", "U"))
