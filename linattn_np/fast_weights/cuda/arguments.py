"""Argument structs of the core's kernels, each declared once; runtime/cuda/structs.py generates their C++."""

from __future__ import annotations

from ...ops.cuda.arguments import BYTES, FLOATS, OUT_BYTES, OUT_FLOATS
from ...runtime.cuda.structs import DOUBLE, FLOAT, I64, INT, Struct

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
MOMENTUM = Struct(  # momentum.cu, momentum_walk.cu
    "fast_weights/MomentumArguments",
    ("q k v", TOKENS),  # backward, v: dout
    ("alpha mu beta eta", TOKENS),  # of one column
    ("S M", BYTES),  # (N, H, K, V): the initial states, backward the gradients of the last ones; null for zeros
    ("out errors", OUT_BYTES),  # (N, H, T, V), or null; errors: e_t, backward dv_t
    ("A", BYTES), ("A_end", OUT_BYTES),  # of a mini-batch of more tokens: the gradient of A_end, where it is not S_end
    ("S_end M_end", OUT_BYTES),  # like S: the last states, backward the gradients of the first ones
    ("S_tiles M_tiles", OUT_BYTES),  # (N, H, tiles, K, V), or null
    ("systems", BYTES),  # of momentum_systems.cu; token by token null
    ("T V heads parts tiles n", INT),  # parts: blocks of columns; n: tokens of a tile
    ("rest", INT),  # tokens of whole mini-batches
)  # fmt: skip
RATES = Struct(  # rates.cu: tiles of n tokens, `per` of a sequence and head
    "fast_weights/RatesArguments",
    ("alpha mu beta", TOKENS),  # of one column
    ("w s", OUT_BYTES),  # (tiles, n + 1, n + 2)
    ("d", BYTES),  # (tiles, 2 n + 2, n + 2)
    ("dalpha dmu dbeta", OUT_BYTES),  # (N, H, T)
    ("tiles", I64), ("n T heads per", INT),
)  # fmt: skip
MOMENTUM_VJP = Struct(  # momentum_vjp.cu
    "fast_weights/MomentumVjpArguments",
    ("q k dout", TOKENS),  # q, dout null: no token is read
    ("alpha eta", TOKENS),
    ("dq dk", TOKENS),
    ("errors dv", BYTES),  # (N, H, T, V): e_t, dv_t
    ("S M R N", BYTES),  # (N, H, tiles, K, V): states before a tile, their gradients after it
    ("w s systems", BYTES),  # of rates.cu and momentum_systems.cu
    ("d deta", OUT_BYTES),  # (N, H, tiles, 2 n + 2, n + 2), (N, H, T)
    ("T K V heads tiles n", INT),
)  # fmt: skip
MOMENTUM_SYSTEMS = Struct(  # momentum_systems.cu
    "fast_weights/MomentumSystemsArguments",
    ("q k", TOKENS),  # q null: none
    ("alpha eta", TOKENS),
    ("w s", BYTES),  # (N, H, tiles, n + 1, n + 2)
    ("systems", OUT_BYTES),  # (N, H, tiles, numbers of a tile)
    ("T K heads tiles n", INT),
)  # fmt: skip
BETWEEN = Struct(  # between.cu: dense arrays
    "fast_weights/BetweenArguments",
    ("x0 x1 x2 x3 x4", BYTES), ("y0 y1 y2", OUT_BYTES),
    ("c0 c1 c2", BYTES),  # a number of each matrix of `each` numbers, or null
    ("gamma beta", BYTES),  # (heads, D)
    ("count each", I64),  # numbers, or rows; of a head those one after the other; rows of a matrix of columns
    ("D heads", INT), ("a b", DOUBLE),
)  # fmt: skip
