"""Argument structs of the kernels of ops/, each declared once; runtime/cuda/structs.py generates their C++."""

from __future__ import annotations

from math import prod

from ...runtime.arrays import Array
from ...runtime.cuda.structs import DOUBLE, FLOAT, I64, INT, U32, U64, Struct, pointer

FLOATS, OUT_FLOATS, BYTES, OUT_BYTES = (pointer(x) for x in ("const float", "float", "const char", "char"))

# an array (B, T, heads, width): strides in bytes; heads of the outputs that share one of its heads
ROWS = Struct("ops/Rows", ("data", OUT_BYTES), ("batch token head", I64), ("group", INT))
NO_ROWS = (0, 0, 0, 0, 1)

# unit_rows.cu: dy and y contiguous, x of rows = B T heads
UNIT_ROWS_ARRAY = Struct("ops/UnitRowsArray", ("x", ROWS), ("dy", BYTES), ("y", OUT_BYTES), ("rows T heads", U32))
UNIT_ROWS = Struct("ops/UnitRowsArguments", ("of", UNIT_ROWS_ARRAY, 2), ("first", U32), ("root", FLOAT))
# first: blocks of of[0]; root: the square root of eps

STEP_SIZE = Struct(  # step_size.cu
    "ops/StepSizeArguments",
    ("x z", ROWS),  # z.data null: no gate
    ("dt", pointer("const void")),  # (tokens, heads), of kind dt_kind
    ("bias A D", FLOATS),  # (heads), null for none; D_by_rows: D (tokens, heads)
    ("other dout", BYTES),  # (tokens, heads, LA_K): the core's output or dv, of kind LA_GRAD; cotangent of an output
    ("dg", FLOATS),  # (tokens, heads)
    ("y dx dz", OUT_BYTES),  # v, the output, or the core's dout; gradients
    ("g ddt dA dD", OUT_FLOATS),  # g; gradient of dt; terms of the gradients of A (dg dt) and D (<dout, x>)
    ("rows T heads", U32), ("dt_kind soft D_by_rows", INT),  # soft: softplus
    ("low high", FLOAT),
)  # fmt: skip
SUMS_PART = Struct(  # first: its first block; kind: of y
    "ops/SumsPart", ("x", BYTES), ("y", OUT_BYTES), ("terms width block parts first", U32), ("kind", INT)
)  # fmt: skip
SUMS = Struct("ops/SumsArguments", ("of", SUMS_PART, 8), ("count", U32))  # sums.cu

GATE_FORMULA = Struct(  # gate_formula.cu
    "ops/GateFormulaArguments",
    ("raw", pointer("const void")),  # (tokens, width), of kind LA_DTYPE
    ("A_log bias dg", FLOATS),  # (heads) or null, (width) or null, (tokens, width)
    ("g da parts", OUT_FLOATS),  # the formula; gradient of raw; sums over blocks of tokens (blocks, 2, width): da, g dg
    ("tokens", I64), ("width each block", U32),  # numbers per token, per head; tokens per block
    ("bound", FLOAT),  # of the bounded gate
)  # fmt: skip

COMPLEMENT = Struct(  # complement.cu: dense arrays of `size` numbers
    "ops/ComplementArguments",
    ("g dk dg", BYTES), ("y", OUT_BYTES), ("size", I64),
)  # fmt: skip


PRODUCT = Struct(  # product.cu: dense arrays of `size` numbers; back z is the gradient of the product
    "ops/ProductArguments",
    ("x y", BYTES), ("z", OUT_BYTES), ("add", BYTES), ("dx dy", OUT_BYTES), ("size", I64),
)  # fmt: skip


# formula.cu: an array (batch, head, token, column), strides in bytes; kind: 0 bfloat16, 1 float16, 2 float32, 3 float64
FORMULA_ARRAY = Struct(
    "ops/FormulaArray", ("data", OUT_BYTES), ("batch head token column", I64), ("kind width", INT)
)  # fmt: skip
FORMULA = Struct("ops/FormulaArguments", ("x y z u out more", FORMULA_ARRAY), ("rows", I64), ("heads tokens", U32),
                 ("a b", DOUBLE), ("how", INT))  # fmt: skip

GAUGE = Struct(  # gauge.cu: dense arrays
    "ops/GaugeArguments", ("a b", pointer("const double")), ("m_0", FLOATS), ("m", pointer("double")),
    ("decay write least", OUT_FLOATS), ("offsets", pointer("const i64")), ("T heads", I64),
)  # fmt: skip
SHARES = Struct(  # shares.cu: dense arrays (tokens, columns); begin, dbegin (sequences, columns)
    "ops/SharesArguments", ("s begin", BYTES), ("share g N", OUT_BYTES), ("dshare dg", BYTES), ("ds dbegin", OUT_BYTES),
    ("offsets", pointer("const i64")), ("T columns", I64),
)  # fmt: skip
PRECONDITIONER = Struct(  # preconditioner.cu: dense arrays; dcenter: sums over parts of sequences
    "ops/PreconditionerArguments",
    ("k a b center begin dw dend", BYTES), ("w end A dk da db dcenter dbegin", OUT_BYTES),
    ("offsets", pointer("const i64")), ("T", I64), ("H group", U32),  # group: heads that share a key
    ("a_kind b_kind center_kind", INT), ("eps rate", DOUBLE),
)  # fmt: skip
TRAPEZOID = Struct(  # trapezoid.cu: a state has tokens of its own, of all heads; null: there is none
    "ops/TrapezoidArguments",
    ("x B C", ROWS), ("B_row C_row", I64), ("angle dq dk dv dout", BYTES),  # all but x, B and C dense
    ("dt trap A D m past_k past_v dabove", FLOATS),  # B_row: bytes between the rows of a token
    ("sums", pointer("double")),  # of parts of tokens, of all sequences: (parts, H, P)
    ("q k v", OUT_BYTES), ("g shares above end_k end_v end_own end_rotation", OUT_FLOATS),
    # end_rotation (2, states, H, P)
    ("dg dend_k dend_v dend_own", FLOATS), ("dend_theta", pointer("const double")),
    ("dB dC dx dangle", OUT_BYTES), ("ddt dtrap dA written dw down later dm dpast_k dpast_v", OUT_FLOATS),
    ("late", FLOATS), ("S", OUT_FLOATS),  # of settle: the core's state, and the state
    ("offsets", pointer("const i64")), ("T", I64), ("states parts H rates", U32), ("scale", FLOAT),
)  # fmt: skip
RANKS = Struct(  # ranks.cu: rows of the core, pairs of rows, gradients dense; sums of parts (parts, H, R, V)
    "ops/RanksArguments",
    ("x z", ROWS), ("out late dy", BYTES), ("above shares m gates outs", FLOATS),  # gates: n, or null
    ("y du dz", OUT_BYTES), ("dabove dgates douts", OUT_FLOATS), ("tokens T", I64), ("H", U32),
)  # fmt: skip

LEVELS = Struct(  # levels.cu: dense arrays; x, base (rows, width), y, other (rows, count, width)
    "ops/LevelsArguments",
    ("x y base", OUT_BYTES), ("other lam", BYTES), ("dlam", OUT_FLOATS),  # lam, dlam (rows, levels)
    ("positions", pointer("const i64")),  # of the tokens, or null: t mod T
    ("rows T", I64), ("heads width first count levels kind", INT),  # rows: tokens times heads; kind: of lam
)  # fmt: skip


# nn/: rows of rows, strides in bytes; an array of numbers (tokens, channels) has outer alone
STRIDED = Struct("ops/Strided", ("data", OUT_BYTES), ("outer inner", I64))
NORM = Struct(  # nn/norm.cu: gate and dgate, weight and dweight, bias and dbias null for none
    "ops/NormArguments",
    ("x gate dy", STRIDED), ("weight bias", BYTES),
    ("y dgate dweight dbias", OUT_BYTES),  # y or dx; dweight, dbias: sums over blocks (parts, groups, LA_D)
    ("root", DOUBLE), ("rows inner groups block", U32),  # root: of D eps, or of eps
)  # fmt: skip
SOFTMAX = Struct(  # nn/softmax.cu
    "ops/SoftmaxArguments",
    ("x dy", STRIDED), ("y", OUT_BYTES), ("labels", pointer("const i64")),
    ("loss lse number", pointer("void")),  # losses or cotangents of them, `each` 0: one of all; how many, or null
    ("ignored", I64), ("smoothing z", DOUBLE), ("rows inner each", U32),
)  # fmt: skip
CONV = Struct(  # nn/short_conv.cu: x and dy of tokens
    "ops/ConvArguments",
    ("x dy", STRIDED), ("weight bias past dend", BYTES),  # (D, W), (D), (sequences or a pool, S, D), (sequences, S, D)
    ("y end dpast parts", OUT_BYTES),  # y, dx or the final state; of a step; dpast; sums over blocks (parts, W + 1, D)
    ("places", pointer("const void")), ("offsets", pointer("const i64")),  # rows of the pool, cu_seqlens; or null
    ("segments", pointer("const int")),  # of ragged calls: (sequence, first token in it)
    ("D S T each", U32), ("count per_sequence sequences", U32),  # count: segments of `each` tokens
    ("pool", I64),  # rows of it
)  # fmt: skip
FEATURE_ROWS = Struct(  # features.cu, monomials.cu: x rows of K numbers; phi, dphi (rows, width) and dx (rows, K) dense
    "ops/FeatureRows", ("x", STRIDED), ("phi dx", OUT_BYTES), ("dphi", BYTES), ("rows", I64), ("inner", U32)
)  # fmt: skip
FEATURES = Struct(  # features.cu; first: blocks of of[0]
    "ops/FeaturesArguments",
    ("of", FEATURE_ROWS, 2), ("W", BYTES), ("first columns width steps", U32),  # W: a table of ops/cuda/features.py
    ("square less size", FLOAT),
)  # fmt: skip
MONOMIALS = Struct(  # monomials.cu
    "ops/MonomialsArguments", ("of", FEATURE_ROWS, 2), ("first", U32), ("constant linear quadratic", FLOAT)
)  # fmt: skip
ROTARY = Struct(  # nn/rotary.cu: x (tokens, heads, K)
    "ops/RotaryArguments",
    ("x dy", STRIDED), ("cos sin", pointer("const void")),  # (period, angle_heads, P), `step` numbers a token
    ("y", OUT_BYTES), ("tokens heads period angle_heads K P step", U32),
)  # fmt: skip
OPTIMISER = Struct(  # optimiser.cu: dense vectors of `size` numbers; master null unless p has 16 bits
    "ops/OptimiserArguments",
    ("p", OUT_BYTES), ("g", BYTES), ("master m v", OUT_BYTES),
    ("sums numbers", pointer("double")),  # (blocks), those of a step
    ("size decaying", I64), ("blocks", U32),  # decaying: numbers that decay, the first ones
    ("decay a b eps", DOUBLE),  # a, b: 1 less the betas
)  # fmt: skip
JOIN_PART = Struct("ops/JoinPart", ("x", BYTES), ("to bytes", I64), ("first", U32))  # first: its first block
JOIN = Struct("ops/JoinArguments", ("parts", JOIN_PART, 100), ("y", OUT_BYTES), ("count", U32))  # join.cu
DROPOUT_JUMP = Struct("ops/DropoutJump", ("a_high a_low c_high c_low", U64))
DROPOUT = Struct(  # nn/dropout.cu: dense arrays of `size` numbers
    "ops/DropoutArguments",
    ("x", BYTES), ("y", OUT_BYTES), ("size", I64), ("state_high state_low", U64), ("jumps", DROPOUT_JUMP, 48),
    ("factor", DOUBLE), ("p", FLOAT),
)  # fmt: skip
EMBEDDING = Struct(  # nn/embedding.cu: rows of D numbers; ids (N,), a table (V, D)
    "ops/EmbeddingArguments",
    ("x", STRIDED), ("y", OUT_BYTES), ("ids", pointer("const i64")),  # x: the table, or dy
    ("from_keys from_order", pointer("const u32")), ("to_keys to_order counts", pointer("u32")),  # of the sort
    ("parts", pointer("void")),  # (chunks, 2, D)
    ("N V D shift blocks first", U32),
)  # fmt: skip


def address(y: Array | None) -> int:
    """The address of an array; 0 for None."""
    return 0 if y is None else y.data.ptr


def rows_of(y: Array | None, heads: int | None = None) -> tuple[int, ...]:
    """The ROWS struct of an array (..., T, heads, width) for outputs with `heads` heads."""
    if y is None:
        return NO_ROWS
    y = y if y.ndim == 4 else y.reshape(prod(y.shape[:-3]), *y.shape[-3:])
    return y.data.ptr, *y.strides[:3], 1 if heads is None else heads // y.shape[2]
