"""Argument structs of the core's kernels, each declared once; runtime/cuda/structs.py generates their C++."""

from __future__ import annotations

from ...ops.cuda.arguments import BYTES, FLOATS, OUT_BYTES, OUT_FLOATS
from ...runtime.cuda.structs import FLOAT, I64, INT, Struct

# an array (batch, head, T, D), strides in bytes, of dense rows; or a number of each token
TOKENS = Struct("fast_weights/Tokens", ("data", OUT_BYTES), ("batch head token", I64))
NO_TOKENS = (0, 0, 0, 0)

LINEAR = Struct(  # fast_weights/linear*.cu: states (batch, head, k, v), rows of them (batch, head, v), dense
    "fast_weights/LinearArguments",
    ("q k v dout eta gain", TOKENS),  # gain null: 1
    ("out dq dk dv deta dgain", TOKENS),
    ("W b", FLOATS),  # before the first token; backward: gradients of those after the last one
    ("weight shift", FLOATS),  # of the norm, (head, v)
    ("end_W end_b", OUT_FLOATS),  # after the last token; backward: gradients of those before the first one
    ("end_A end_bA", OUT_FLOATS),  # of the mini-batch that has not ended; backward: their gradients, which are read
    ("marks held", OUT_FLOATS),  # states before every LA_EACH-th mini-batch, or null; of a group, each
    ("dweight dshift", OUT_FLOATS),  # (batch, head, v)
    ("T heads groups mini_batch before", INT),  # groups: marks of a sequence; before: queries read the step before
    ("eps", FLOAT),
)  # fmt: skip
MOMENTUM = Struct(  # momentum.cu
    "fast_weights/MomentumArguments",
    ("q k v", TOKENS),  # backward, v: dout
    ("alpha mu beta eta", TOKENS),  # of one column
    ("S M", BYTES),  # (N, H, K, V): the initial states, backward the gradients of the last ones; null for zeros
    ("out", OUT_BYTES),  # (N, H, T, V)
    ("S_end M_end", OUT_BYTES),  # like S: the last states, backward the gradients of the first ones
    ("S_tiles M_tiles", OUT_BYTES),  # (N, H, tiles, K, V), or null
    ("T V heads parts tiles", INT),  # parts: blocks of columns
)  # fmt: skip
RATES = Struct(  # rates.cu: dense arrays of tiles of n tokens
    "fast_weights/RatesArguments",
    ("alpha mu beta", BYTES),  # (tiles, n)
    ("w s", OUT_BYTES),  # (tiles, n + 1, n + 2)
    ("d", BYTES),  # (tiles, 2 n + 2, n + 2)
    ("dalpha dmu dbeta", OUT_BYTES),
    ("tiles", I64), ("n", INT),
)  # fmt: skip
