"""Argument structs of the core's kernels, each declared once; runtime/cuda/structs.py generates their C++."""

from __future__ import annotations

from ...ops.cuda.arguments import BYTES, OUT_BYTES, STRIDED
from ...runtime.cuda.structs import DOUBLE, I64, INT, U32, Struct, pointer

WORDS, OFFSETS = pointer("u64"), pointer("const i64")

# an array (batch, T, D): strides in bytes, of dense rows
TOKENS = Struct("elementwise/Tokens", ("data", OUT_BYTES), ("batch token", I64))
NO_TOKENS = (0, 0, 0)

PARAMETER = Struct("elementwise/Parameter", ("data", BYTES), ("kind", INT))  # (D,); null: not given

SCAN = Struct(  # scan.cu, average.cu
    "elementwise/ScanArguments",
    ("gate x dout out dgate", TOKENS),  # out: of a backward dx; dgate of a constant gate: a row a tile
    ("start", BYTES), ("end marks", OUT_BYTES),  # (sequences, D), null: zeros; marks: states every LA_MARK tokens
    ("words", WORDS),  # a ticket, then the links of tiles
    ("offsets", OFFSETS), ("table", pointer("const int")),  # of a ragged batch: sequence, tile, first tile, first mark
    ("scale", DOUBLE),
    ("D columns", U32),  # columns: blocks of channels
    ("sequences T tiles marks_each", U32), ("blocks", U32),  # tiles, marks_each: of a sequence
    # of a formula: the input gate and its gradient; arrays of channels, and their gradients' sums over tiles
    ("write dwrite", TOKENS), ("parameters", PARAMETER, 3), ("sums", OUT_BYTES),
    ("start_n start_m", BYTES), ("last", OUT_BYTES),  # of average.cu: the other parts of a state; the last states, kept
)  # fmt: skip
CLEAR = Struct("elementwise/ClearArguments", ("words", WORDS), ("count", I64))
SELECTIVE = Struct(  # selective*.cu: arrays that are written are dense; no A: dt are betas, decays 1 - b B^2
    "elementwise/SelectiveArguments",
    ("x dt z B C dout", STRIDED),  # of tokens
    ("A skip bias start", BYTES),  # (D, N), (D,), (D,), (sequences, D, N): h_0 or the gradient of h_T; null: 0
    ("out end marks", OUT_BYTES),  # end: h_T or the gradient of h_0; marks: the states before every LA_TILE tokens
    ("begins sums", OUT_BYTES),  # of segments: (sequences, segments, D, N), sums of dt (.., D) or decays
    ("dx ddt dz", OUT_BYTES),
    ("dB dC", OUT_BYTES),  # sums over the channels of a block: (tiles, tokens, N)
    ("dA dskip dbias", OUT_BYTES),  # of segments: (sequences, segments, D, N) or (.., D)
    ("offsets", OFFSETS),  # of a ragged batch, else null
    ("tokens", I64),  # of the whole batch
    ("scale low high", DOUBLE),
    ("A_kind skip_kind bias_kind start_kind", INT),
    ("T D sequences segments each tiles", INT),  # each: tokens of a segment; tiles: blocks of channels
)  # fmt: skip
