"""Argument structs of the core's kernels, each declared once; runtime/cuda/structs.py generates their C++."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

from ...ops.cuda.arguments import BYTES, FLOATS, OUT_BYTES, OUT_FLOATS, ROWS, address
from ...runtime.arrays import Array
from ...runtime.cuda.structs import DOUBLE, FLOAT, I64, INT, INVERSE, TENSOR_MAP, U32, Struct, pointer

OFFSETS = ("offsets", pointer("const i64"))  # of a ragged batch, else null

# element (row, column) of the state in slot n: data[n * slot + row * this row + column * this column]
STATES = Struct("matrix_state/States", ("data", OUT_FLOATS), ("slot row column", I64))
# one number per token and head: strides in floats; heads of the outputs that share one; null: no decay
GATE = Struct("matrix_state/Gate", ("data", FLOATS), ("batch token head", I64), ("group", INT))

# states at positions, or their gradients: slots (batch rows, positions, heads / at_group); of each chunk of a
# sequence the number of the position at its end, -1: none; in a ragged batch at the chunk's first token
POSITIONS = (("at", STATES), ("at_chunks", pointer("const int")), ("at_count at_group", INT))

SCAN = Struct(  # scan.cu, scan_wgmma.cu, adds_wgmma.cu
    "matrix_state/ScanArguments",
    ("q k v x out", ROWS), ("g", GATE), OFFSETS,
    ("start end", STATES), ("start_group end_group", INT),  # heads that share a slot; start_group 0: a slot a segment
    ("sums", OUT_FLOATS),  # of a pass without outputs: log2 decay of each segment
    ("dots", OUT_FLOATS),  # (value blocks, heads, tokens)
    ("states", OUT_BYTES), ("products", OUT_FLOATS), ("marks", I64),  # every LA_MARK tokens; slots a sequence
    ("tokens", I64),  # of the whole batch
    ("T heads segments chunks every", INT), ("read write", FLOAT),  # chunks: of a segment
    *POSITIONS,
)  # fmt: skip
LEVEL_PASS = Struct(  # levels_wgmma.cu: fields of SCAN; heads: first, and each of `count` levels of it
    "matrix_state/LevelPassArguments",
    ("q k v x out", ROWS), ("g", GATE), OFFSETS,
    ("dots", OUT_FLOATS), ("states", OUT_BYTES), ("products", OUT_FLOATS), ("marks tokens", I64),
    ("T heads first count", INT), ("read write", FLOAT),
)  # fmt: skip
WRITES = Struct(  # writes_wgmma.cu
    "matrix_state/WritesArguments",
    ("q k v dout dk dv", ROWS), ("g", GATE), OFFSETS,
    ("start end", STATES), ("start_group end_group", INT),  # R after the last token (or each segment), before the first
    ("dots", OUT_FLOATS), ("states", OUT_BYTES), ("marks tokens", I64),
    ("T heads segments chunks", INT), ("write", FLOAT),
    *POSITIONS,
)  # fmt: skip
SEGMENTS = Struct(  # segments.cu
    "matrix_state/SegmentsArguments",
    ("states start", STATES), ("start_group", I64),  # start: S_0, one a start_group heads, or null
    ("sums", FLOATS), OFFSETS,  # log2 decay of each segment
    ("elements", I64),  # of a state
    ("T heads segments chunks columns blocks", INT),  # blocks: of a state
)  # fmt: skip
GATE_GRAD = Struct(  # gate_grad.cu
    "matrix_state/GateGradArguments",
    ("read_dots write_dots", FLOATS),  # <q, dq>, <k, dk>: (parts, heads, tokens)
    ("products", FLOATS),  # <S, dS> before each block: (sequences, heads, marks, parts)
    ("g", GATE), ("dg", OUT_FLOATS), OFFSETS,  # dg (tokens, heads)
    ("tokens marks blocks", I64), ("T heads parts warps", INT),  # blocks: sequences heads marks; warps: of a part
)  # fmt: skip
NORMALISER = Struct(  # normaliser.cu
    "matrix_state/NormaliserArguments",
    ("q k dq dk", ROWS), ("g", GATE), OFFSETS,
    ("w c", FLOATS),  # weights (tokens, heads / group_w), null: 1; gradients of the sums (tokens, heads)
    ("start", FLOATS), ("end", OUT_FLOATS),  # of carry (sequences, heads, K): what is before all parts, null: 0; after
    ("begins decays", OUT_FLOATS),  # of parts (slots, heads, K), (slots, heads)
    ("later later_decays later_start", FLOATS),  # backward: likewise, and start
    ("sums dw dg", OUT_FLOATS),  # (tokens, heads)
    ("T heads parts group group_w", INT),  # parts: of the longest sequence; group: heads that share a row of begins
    ("add few", INT), ("scale", FLOAT),  # add: to gradients in dq (bit 0), in dk (bit 1)
    # few: begins (bit 0), later (bit 1) have what parts add
)  # fmt: skip
QUOTIENT = Struct(  # quotient.cu: rows x to y; numbers: products with rows u
    "matrix_state/QuotientArguments",
    ("x u y", ROWS), ("sums least", FLOATS), ("numbers", OUT_FLOATS),  # (rows,), (tokens, heads / group), (rows,)
    ("rows T", I64), ("heads group", INT), ("eps", FLOAT),
)  # fmt: skip
HEAD_SUMS = Struct(  # head_sums.cu: pieces of y, of 16 bytes; row: pieces of a head
    "matrix_state/HeadSumsArguments", ("x", pointer("const uint4")), ("y", pointer("uint4")), ("pieces", I64),
    ("group row", INT))  # fmt: skip

DELTA = Struct(  # the delta rule by warpgroup products
    "matrix_state/DeltaArguments",
    ("q k v dout dv dq dk", TENSOR_MAP),  # (columns, heads, tokens, batch)
    ("out other", ROWS),  # destination of out, dv or dq; and of dk, or in reverse the layout of v
    ("g beta", GATE), OFFSETS,
    ("checkpoints ends", OUT_BYTES),  # of the chunks; gradients of the states after each chunk
    ("start end", STATES),  # state, or its gradient, that a scan begins with and ends with
    ("begins", OUT_FLOATS),  # the same of each segment but the first: (slots, segments, 128, 128)
    ("added", OUT_FLOATS), ("transfers", OUT_BYTES),  # a segment's offset; its transfer matrix, diag(d) + R
    ("dg dbeta", OUT_FLOATS),  # (tokens, heads)
    ("slots", I64),  # chunks of a head over the whole batch
    ("T heads segments chunks", INT),  # chunks: of a segment
    ("group_q group_k group_v", INT),  # heads that share one of q's, k's, v's
    ("start_group end_group", INT),  # heads that share an initial, a final state
    ("which every", INT), ("scale", FLOAT),  # which: of the reverse chain, WHOLE, ADD or EVERY
    ("eps", FLOAT),  # with LA_UNIT, added to the squared lengths
    *POSITIONS,
)  # fmt: skip
DELTA_SCAN = Struct(  # the portable chains
    "matrix_state/DeltaScanArguments",
    ("q k v out r writes", ROWS),  # v: dO in reverse; out: dv; writes: the new values, or dW over beta
    ("g beta", GATE), OFFSETS,
    ("inverses states", OUT_BYTES),  # A of the chunks; state before each, or its gradient after it
    ("start end", STATES), ("start_group end_group", INT),  # start_group 0: a slot a segment
    ("transfers", STATES), ("slots", I64), ("T heads segments chunks", INT), ("scale", FLOAT),
)  # fmt: skip
DELTA_GRADS = Struct(  # the portable gradients
    "matrix_state/DeltaGradArguments",
    ("q k r dout dv new_values dq dk dr", ROWS), ("g beta", GATE), OFFSETS,
    ("states ends", BYTES), ("dg dbeta", OUT_FLOATS),
    ("slots", I64), ("T heads segments unused", INT), ("scale", FLOAT),  # segments: chunks of the longest sequence
)  # fmt: skip
DELTA_SEGMENTS = Struct(  # delta_scan_segments.cu
    "matrix_state/DeltaSegmentsArguments", OFFSETS,
    ("added transfers", FLOATS), ("begins", OUT_FLOATS),  # (slots, segments, V, K), (.., K, K), (.., V, K)
    ("start", STATES), ("start_group T heads segments chunks", INT),  # heads that share a start
)  # fmt: skip

VECTOR_REVERSE = Struct(  # vector_reverse.cu
    "matrix_state/VectorReverseArguments",
    ("q k v dout dv", TENSOR_MAP), ("g out", ROWS), OFFSETS,  # v: with erase; out: dv too
    ("grams inverses", BYTES), ("ends", OUT_BYTES),  # P, of every chunk N and beta; G = dL/dS after it
    ("start end", STATES), ("start_group", INT),  # gradient of the last state, of the first
    ("begins added sums", OUT_FLOATS),  # of segments: G after each but the last; what each adds, its decays
    ("slots", I64), ("T heads segments chunks every", INT),  # chunks: of a segment
    ("group_q group_k group_v", INT), ("scale", FLOAT),
    *POSITIONS,
)  # fmt: skip
VECTOR_GRADS = Struct(  # vector_grads.cu
    "matrix_state/VectorGradArguments",
    ("v dout", TENSOR_MAP),  # v: with erase dW, which is dv
    ("q k g dq dk dg", ROWS), OFFSETS,
    ("states ends new_values", BYTES),  # of every chunk: S before it, G after it, with erase U
    ("flags", pointer("int")),  # of every item, whether the exact build does it
    ("u", FLOATS), ("du", OUT_FLOATS),  # bonus (heads, K); of every chunk
    ("erase_dots", OUT_FLOATS),  # with erase r.k over each half of the channels: (halves, heads, tokens)
    ("slots tokens", I64), ("items", U32),  # items: halves of the channels, heads, chunks, sequences
    ("T heads chunks group_v group_u", INT), ("scale", FLOAT),  # chunks: of the longest sequence
)  # fmt: skip
VECTOR_BONUS = Struct(  # vector_bonus.cu: du (heads, K) from the du of the chunks
    "matrix_state/VectorBonusArguments",
    ("parts", FLOATS), ("du", OUT_FLOATS), OFFSETS, ("slots", I64), ("T heads sequences", INT),
)  # fmt: skip
VECTOR_STRENGTHS = Struct(  # vector_strengths.cu; dbeta (tokens, heads)
    "matrix_state/VectorStrengthArguments",
    ("ends", BYTES), ("erase_dots", FLOATS), ("beta", GATE), ("dbeta", OUT_FLOATS), OFFSETS,
    ("slots tokens", I64), ("items", U32), ("T heads chunks", INT),  # items: chunks, heads, sequences
)  # fmt: skip
VECTOR = Struct(  # vector/: one decay a token and key channel, by warpgroup products
    "matrix_state/VectorArguments",
    ("q k v g out", TENSOR_MAP),  # (columns, heads, tokens, batch)
    ("to", ROWS),  # where the end of a sequence is stored
    OFFSETS,
    ("start end", STATES),  # state that a scan begins with and ends with
    ("begins", OUT_FLOATS),  # the same of each segment but the first: (slots, segments, 128, 128)
    ("added decays", OUT_FLOATS), ("transfers", OUT_BYTES),  # of segments: offset; decay (.., 128), or matrix
    ("u", FLOATS),  # bonus (heads of u, K)
    ("states grams inverses factors new_values", OUT_BYTES),  # of chunks: state before, P, N, beta; -Kc, Kd, decay; U
    ("beta", GATE),
    ("flags", pointer("int")),  # of segments of a scan, two each, that take the exact path
    ("handed", OUT_BYTES),  # of the scan's blocks: a state that the one before leaves, and whether it is there
    ("slots", I64),  # chunks of a head over the whole batch
    ("T heads segments chunks every", INT),  # chunks: of a segment
    ("steps more", INT),  # chunks of a block of the scan; blocks that have one more
    ("group_q group_k group_v group_g group_u", INT),  # heads that share one of q's, k's, v's, g's, u's
    ("start_group end_group", INT), ("scale", FLOAT),  # heads that share an initial, a final state
    *POSITIONS,
)  # fmt: skip

FREE = Struct(  # free/: the same with a free rank-one term; backward v is dout, and out dv
    "matrix_state/FreeArguments",
    ("q k v g a b out", TENSOR_MAP), ("to", ROWS), OFFSETS,
    ("start end", STATES),
    ("factors extras", OUT_BYTES),  # of the chunks; what the backward's chain reads besides
    ("states corrections", OUT_BYTES),  # state before, w (gradient after, dw) of each
    ("flags", pointer("int")),  # of chunks that take the exact path
    ("slots", I64), ("T heads segments chunks", INT),
    ("group_q group_k group_v group_g group_a group_b start_group end_group", INT), ("scale", FLOAT),
    *POSITIONS,
)  # fmt: skip

FREE_GRADS = Struct(  # the gradients of free/ but dv
    "matrix_state/FreeGradArguments",
    ("q k v g a b dout", TENSOR_MAP), ("rows_q rows_k rows_g rows_a rows_b dq dk dg da db", ROWS), OFFSETS,
    ("states ends corrections grad_corrections", BYTES),  # of the chunks: S before, G after, w, dw
    ("flags", pointer("int")),  # of chunks that the exact kernel does
    ("slots", I64), ("T heads chunks", INT),  # chunks: of the longest sequence
    ("group_q group_k group_v group_g group_a group_b items", INT), ("scale", FLOAT),
)  # fmt: skip

ERASE_VECTORS = Struct(  # erase_vectors.cu; a, values and what follows: dense, of the outputs' heads
    "matrix_state/EraseVectorArguments",
    ("r g v", ROWS), ("beta", GATE),
    ("a values", OUT_BYTES),  # inputs of the rank-one kernels; in the backward, their gradients
    ("dg dr dv dk", OUT_BYTES), ("db", BYTES), ("dbeta", OUT_FLOATS),  # dg, dk: of those kernels, then with the rest
    ("rows", I64), ("T heads", INT),
)  # fmt: skip

RECURRENCE = Struct(  # token/: gradients token by token; arrays that are written are dense (tokens, heads, width)
    "matrix_state/RecurrenceArguments",
    ("q k v g a b dout dq dk dv dg da db", ROWS), OFFSETS,
    ("u", FLOATS),  # bonus (heads of u, K)
    ("w dw", OUT_BYTES),  # what a and b read, float32
    ("start end", OUT_FLOATS),  # the state, or its gradient, before and after: (sequences, heads, K, V)
    ("marks dots", OUT_FLOATS),  # decayed states at marks; q.dq and a.da by channels, terms of dg
    ("marks_of_sequence", I64), ("T heads group_u", INT), ("scale", FLOAT),
)  # fmt: skip

VECTOR_PORTABLE = Struct(  # portable/: arrays that are written are dense (tokens, heads, width)
    "matrix_state/VectorPortableArguments",
    ("q k v g beta out dout dq dk dv dg", ROWS),
    ("gv", ROWS),  # log decays of the value channels
    ("error du", ROWS),  # float32. Delta rule: e = v - k S~; the gradient of u = beta e. gv: out without P_tt v_t
    OFFSETS,
    ("u", FLOATS),  # bonus (heads of u, K)
    ("start end", OUT_FLOATS),  # the state, or its gradient, before and after: (sequences, heads, K, V)
    ("marks dots", OUT_FLOATS),  # decayed states at marks; q.dq (and k.dr) by channels, terms of dg
    ("dr dbeta", OUT_FLOATS),  # delta rule: what dk has of k that reads S~; the gradient of beta
    ("parts", OUT_FLOATS),  # of the bonus's gradient (blocks, heads, K)
    ("marks_of_sequence tokens", I64), ("T heads group_u", INT), ("scale", FLOAT),
)  # fmt: skip

# step.cu: strides in bytes; heads of the states (of the outputs, for q and out) that share one; kind of element
VECTORS = Struct("matrix_state/Vectors", ("batch token head", I64), ("group", INVERSE), ("kind", INT))
STEP = Struct(
    "matrix_state/StepArguments",
    ("q k v g gv r beta a b u", BYTES), ("out", OUT_BYTES),
    ("start", pointer("const StoredAs<LA_START>::type")),  # null: zeros
    ("end", pointer("StoredAs<LA_END>::type")),  # null: not stored
    ("start_slots end_slots", pointer("const void")),  # the slot of each sequence's state, else null
    ("fresh", pointer("const bool")), OFFSETS,  # which sequences begin with zeros, else null
    ("at_q at_k at_v at_g at_gv at_r at_beta at_a at_b at_u at_out", VECTORS),
    ("start_slot start_head start_row end_slot end_head end_row", I64),  # in elements
    ("places", I64),  # number of slots: a slot out of range is read as zeros and not stored
    ("T heads readers slot_bytes", INT), ("heads_inverse", INVERSE),  # heads of the state; queries that read one
    ("read", FLOAT), ("past", INT),  # past 1: states go past the L1 cache
    ("A_log bias", FLOATS),  # of raw log decays: (heads), (heads, 1 or K), or null
    ("theta", FLOATS), ("pairs", INT), ("steps", INT),  # angles (pairs); micro-steps of a token
    ("eps", FLOAT), ("z", FLOATS), ("z_end", OUT_FLOATS),  # sums of weights (sequences, heads, K)
    ("w least", BYTES), ("at_w at_least", VECTORS),  # a number per token and head
    ("root bound strongest", FLOAT),  # the square root of eps; the bound of bounded gates; beta over its sigmoid
)  # fmt: skip

LOG = Struct(  # log.cu
    "matrix_state/LogArguments",
    ("q k v g erase beta", ROWS),  # (rows, tokens, heads, width); g.data null: no decay
    ("kind_q kind_k kind_v kind_g kind_erase kind_beta kind_out", INT),
    ("bonus", BYTES), ("out", OUT_BYTES),  # (heads, K) or null; (rows, tokens, heads queries, V)
    ("state log_k log_u log_g", OUT_BYTES),  # (rows of the pool, heads, K, V), (rows of the pool, heads, slots, width)
    ("low", OUT_BYTES), ("scales", OUT_FLOATS),  # of codes: (rows of the pool, heads, K, ceil(V / 2)), (.., heads, V)
    ("parents", pointer("const int")),  # of nodes (rows, count), null: a chain; of moves, the slots that are moved
    ("cursors", pointer("const int")),  # (3, rows): row of the pool, slot of the oldest token, tokens in the ring
    ("shift more", INT),  # added to all of these slots, and to all of these tokens
    ("rows heads queries tokens first count ring slots", INT),  # `count` tokens from `first` on
    ("erases early updated tree dense", INT),  # dense: states are those of the call's rows
    ("scale", DOUBLE),
)  # fmt: skip

SOLVE = Struct(  # solve.cu
    "matrix_state/SolveArguments", ("q k g beta ridge start", FLOATS), ("x end", OUT_FLOATS), ("enough", FLOAT)
)
SYSTEMS = Struct(  # systems/: float32; of states.cu the heads are those of the matrices, and q, ridge, x are not there
    "matrix_state/SystemsArguments",
    ("q k ridge x", ROWS), ("g beta", GATE), OFFSETS,  # g, beta: of the matrices' heads
    ("start", FLOATS), ("states end", OUT_FLOATS),  # (sequences, H, K, K), (slots, H, K, K), as start
    ("T heads group sequences chunks iterations", INT),  # group: heads that share a matrix; chunks: of a batch row
    ("enough", FLOAT),
)  # fmt: skip


class Positions(NamedTuple):
    """States at positions, or their gradients, and which of them is at the end of each chunk."""

    states: States
    chunks: Array  # (chunks of a sequence,) int32, or (tokens,) of a ragged batch
    number: int
    build: int  # constant LA_AT of kernels: 1, of a ragged batch 2


class States(NamedTuple):
    """Layout of states: rows are value columns, columns are key columns; strides count floats."""

    array: Array | None
    slot: int
    row: int
    column: int
    sums: Array | None = None
    group: int = 1  # heads that share one; 0: one a segment
    positions: Any = None  # Positions of the same layout and heads, which the pass goes by

    def transposed(self) -> States:
        """The same memory with rows and columns swapped."""
        at = self.positions
        at = None if at is None else at._replace(states=at.states.transposed())
        return self._replace(row=self.column, column=self.row, positions=at)

    @property
    def build_at(self) -> int:
        """The constant LA_AT of the build that passes by these states; 0 without positions."""
        return 0 if self.positions is None else self.positions.build

    def fields_of_positions(self) -> dict[str, Any]:
        """The fields of POSITIONS."""
        if self.positions is None:
            return {"at": NO_STATES.values(), "at_chunks": 0, "at_count": 0, "at_group": 1}
        states, chunks, number, _ = self.positions
        return {"at": states.values(), "at_chunks": chunks.data.ptr, "at_count": number, "at_group": states.group}

    def arrays_of_positions(self) -> tuple[Array, ...]:
        """The arrays that those point to."""
        return () if self.positions is None else (self.positions.states.array, self.positions.chunks)

    def values(self) -> tuple[int, ...]:
        """The fields of STATES."""
        return address(self.array), self.slot, self.row, self.column


NO_STATES = States(None, 0, 0, 0)


def gate_of(g: Array | None, heads: int) -> tuple[int, ...]:
    """The GATE struct of a float32 array; an array without batch axes is shared by all batch rows."""
    if g is None:
        return 0, 0, 0, 0, 1
    if g.ndim > 3:
        g = g.reshape(prod(g.shape[:-3]), *g.shape[-3:])
    lead = g.strides[0] // 4 if g.ndim > 3 else 0
    return g.data.ptr, lead, g.strides[-3] // 4, g.strides[-2] // 4, heads // g.shape[-2]
