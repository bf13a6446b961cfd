"""The table of a kernel: its fields and matrices, declared once for both forms, and the arrays of a call as its rows.

Sizes: c tokens in the chunk, c1 = c + 1, K and V channels, K_lanes and V_lanes the same in whole vectors. A name with
_before or _after is the same memory one row earlier or later: what reads S_{t-1} sees decays one token earlier. In the
recurrent form c tokens are a slab, and width columns, width_lanes in whole vectors, a block of the state.

A kind of call is a set of words: a matrix has memory in the calls whose words it stands under, and words are flags.
"""

from __future__ import annotations

from numbers import Integral
from typing import Any, NamedTuple

import numpy as np

from ...runtime.held import Cached
from ...runtime.pieces.memory import empty
from ...runtime.pieces.piece import workspace_kind
from ...runtime.pieces.registers import NARROW, WIDE
from ...runtime.pieces.run import stored_array
from ...runtime.pieces.vectors import lane
from ...runtime.pieces.workspace import ARRAY, SHARED, Layout, Matrix, Workspace, up
from ...runtime.recorder import constant
from ..policy import DECAY_BLOCK as BLOCK
from ..policy import FEATURE_HEADS
from ..types import Inputs, Plan

MONOMIALS, EXPONENTIALS, WAVES = range(1, 4)  # of a feature map; 0: none
EARLY, STRICT = range(1, 3)  # of a gram: it reads S_{t-1}; without the token's own write

TASK = ("BATCH", "FIRST", "STOP", "STATE", "HEAD", "COLUMN", "V", "EARLIER", "LATER", "FROM", "TO", "AT")
SIZES = ("t", "C", "given", "half", "skipped", "segment_count", "group")  # fmt: skip
WORDS = ("decay", "scalar", "vector", "erase", "delta", "free", "query_reads", "erase_reads", "separate_erase_key",
         "has_queries", "bonus", "started", "compensates", "map", "value_decay", "averaged", "formed", "direct_q",
         "direct_v", "direct", "has_dstate", "apart",
         "normalised", "before_sigmoid", "raw_gate", "bounded", "has_bias", "has_rate")  # fmt: skip
FLAGS = ("queries", "reflects", "returning", "iterations", "lane")
TOKENS = ("H", "i", "is_last", "q_row", "column", "width", "wide", "following", "known", "known_batch",
          "known_head", "known_t")  # fmt: skip
NUMBERS = ("scale", "eps", "enough", "root", "strongest", "lower_bound")
ARRAYS = ("in_q", "in_k", "in_v", "in_g", "in_r", "in_beta", "in_b", "in_u", "in_state", "out", "in_dout",
          "in_dstate", "out_dq", "out_dk", "out_dv", "out_dg", "out_dr", "out_dbeta", "out_db", "out_du", "out_dstate",
          "in_gv", "starts", "ends", "out_states", "in_dstates", "in_map", "in_map_T", "in_numbers", "in_segments",
          "out_sums", "out_dgv", "in_A_log", "in_bias")  # fmt: skip

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

# kinds of calls, and the table of each: sizes, flags, and where the matrices of a thread lie

RECOMPUTED = {"k", "r"}  # without slots of their own
DECAYS = {"E", "start", "end", "carry"}  # one for all chunks unless tokens decay


class Cell(NamedTuple):
    """A kind of call: all that a table depends on."""

    dtype: str  # of the computation
    K: int
    V: int  # value columns of a task
    C: int  # tokens of a chunk
    queries: int  # heads of queries a head of the state
    words: frozenset[str]  # what is true of it: see forward.cell_of
    features: tuple[tuple[str, int], ...] = ()  # sizes of a feature map, which q and k go through: K counts features
    iterations: int = 0  # conjugate-gradient steps of the systems x (Z + diag(ridge)) = q; 0: outputs are read

    def sizes(self, W: int) -> dict[str, int]:
        """The sizes that it adds to a kernel's fields; W: numbers of a vector."""
        found = dict.fromkeys(self.words, 1) | {"K_lanes": up(self.K, W), "one": 1, "lane": W, "task_fields": len(TASK)}
        found |= {name: x for name, x in self._asdict().items() if isinstance(x, Integral)}
        return found | dict(self.features)


@Cached
def layout(cell: Cell, group: int = 1, chunks: int = 1) -> Layout:
    """Its table; of an adjoint for `group` heads that share inputs and `chunks` chunks of the longest task."""
    words = cell.words
    W = lane(cell.dtype) * (NARROW if "formed" in words else 1)  # rows of a formed Z are whole blocks
    sizes = {"c": cell.C, "c1": cell.C + 1, "V_lanes": up(cell.V, W), "block": BLOCK, "given": cell.K, "group": group,
             "scratch_rows": 2 * BLOCK + 1 + 3 * cell.C, "slot_after": 1} | cell.sizes(W)  # fmt: skip
    per_chunk = [name for name, m in WORK.declared if m.of <= words and m.slot == "slot" and not m.alias
            and name not in RECOMPUTED and ("scalar" in words or name not in DECAYS)]  # fmt: skip
    return WORK.layout(sizes, cell.dtype, words, dict.fromkeys(per_chunk, chunks))


@Cached
def token_layout(cell: Cell, tokens: int) -> Layout:
    """The table of a kernel of the recurrent form whose slabs have so many tokens."""
    W = lane(cell.dtype)
    sizes = {"c": tokens, "c_queries": tokens * cell.queries, "c_rows": tokens * (1 + cell.queries),
             "width_lanes": WIDE * W} | cell.sizes(W)  # fmt: skip
    if cell.features:
        sizes["group"] = FEATURE_HEADS if tokens == 1 and sizes["map"] != MONOMIALS else 1
        sizes["c_rows"] *= sizes["group"]
    return WORK.layout(sizes, cell.dtype, cell.words)


# the arrays of a call

ROW = {name: n for n, name in enumerate(ARRAYS)}


class Table:
    """The arrays of a call as rows of `numbers`: address, steps, heads that share one, storage, shape; owns them.

    out, end, at: of a forward the output, the final state and the states at positions.
    """

    out: Any = None
    end: Any = None
    at: Any = None

    def __init__(self, x: Inputs, plan: Plan):
        self.numbers = np.zeros((len(ARRAYS), ARRAY), np.int64)
        self.numbers[:, SHARED] = 1
        self.arrays: dict[str, Any] = {}
        self.H = x.v.shape[-2]
        self.query_heads = self.H if x.q is None else max(self.H, x.q.shape[-2])
        self.tokens("in_q", x.q, self.query_heads)
        for name, y in (("in_k", x.k), ("in_v", x.v), ("in_g", x.g), ("in_r", x.r if x.a is None else x.a),
                        ("in_beta", x.beta), ("in_b", x.b), ("in_gv", x.gv)):  # fmt: skip
            self.tokens(name, y, self.H)
        if x.A_log is not None:
            self._put("in_A_log", x.A_log[None, None, :, None], (0, 0, *x.A_log.strides, 0), self.H // len(x.A_log))
        if x.bias is not None:
            self._put("in_bias", x.bias[None, None], (0, 0, *x.bias.strides), self.H // len(x.bias))
        if x.u is not None:
            self._put("in_u", x.u.reshape((1, 1, *x.u.shape)), (0, 0, *x.u.strides), self.H // x.u.shape[0])
        if plan.features is not None:
            tables = plan.features.tables(x.k.shape[-1], np.dtype(plan.dtype))
            for name, y in (("in_map", tables.W), ("in_map_T", tables.WT), ("in_numbers", tables.numbers[None]),
                            ("in_segments", tables.segments)):  # fmt: skip
                self.constant(name, y)
        if plan.average is not None:
            self.tokens("out_sums", plan.average.sums, self.query_heads)

    def results(self, x: Inputs, plan: Plan, state: np.ndarray | None, in_place: bool) -> None:
        """Add the initial state and the results of a forward; in_place: the final state is written over the initial."""
        (*lead, T, _, V), dtype, shape = x.v.shape, np.dtype(plan.dtype), state_shape(x, plan)
        self.out = None if x.q is None else empty((*lead, T, self.query_heads, V), dtype)
        lead, ended = ([], [len(plan.sequences)]) if plan.is_ragged else (lead, lead)
        self.end = state if in_place else empty((*ended, *shape), dtype)
        self.at = None if plan.states_at is None else empty((*lead, len(plan.states_at), *shape), dtype)
        self.tokens("out", self.out, self.query_heads)
        for name, S in (("in_state", state), ("starts", self.end), ("out_states", self.at)):
            self.states(name, S)

    def tokens(self, name: str, y: np.ndarray | None, heads: int) -> None:
        """An array (..., T, H', D) for `heads` heads; one batch row, or none, is shared by the batch."""
        if y is None:
            return
        y = y.reshape((-1, *y.shape[-3:]))
        steps = (0, *y.strides[1:]) if y.shape[0] == 1 else y.strides
        self._put(name, y, steps, heads // y.shape[-2])

    def states(self, name: str, y: np.ndarray | None) -> None:
        """An array (..., H, K, V): rows of the state take the place of tokens."""
        if y is None:
            return
        y = y.reshape((-1, *y.shape[-3:])).swapaxes(1, 2)
        self._put(name, y, y.strides, 1)

    def constant(self, name: str, y: np.ndarray | None) -> None:
        """A matrix, the same for every batch row and head: its rows take the place of tokens."""
        if y is not None:
            self._put(name, constant(y)[None, :, None], (0, y.strides[0], 0, y.strides[1]), 1)

    def _put(self, name: str, y: np.ndarray, steps: tuple[int, ...], shared: int) -> None:
        self.arrays[name] = y
        self.numbers[ROW[name]] = stored_array(y, steps, max(shared, 1))


def key_width(x: Inputs, plan: Plan) -> int:
    """Channels of the keys as the state has them."""
    K = x.k.shape[-1]
    return K if plan.features is None else plan.features.width(K)


def state_shape(x: Inputs, plan: Plan) -> tuple[int, int, int]:
    """(H, K, V) of a state."""
    return x.v.shape[-2], key_width(x, plan), x.v.shape[-1] + (plan.average is not None)
