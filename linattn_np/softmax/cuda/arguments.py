"""Argument structs of the softmax kernels, each declared once; runtime/cuda/structs.py generates their C++."""

from __future__ import annotations

from ...ops.cuda.arguments import FLOATS, OUT_BYTES, OUT_FLOATS, ROWS
from ...runtime.cuda.structs import FLOAT, I64, INT, TENSOR_MAP, Struct, pointer

OFFSETS = ("offsets", pointer("const i64"))  # of a ragged batch, else null
DECAYS = pointer("const float4")  # (batch, heads, tokens): log2 decay since the last reset as hi + lo, resets so far
INTS = pointer("const int")

# numbers of each token and head are (batch, heads, tokens)
ATTENTION = Struct(  # forward.cu, backward.cu (dk, dv), dq.cu
    "softmax/AttentionArguments",
    ("q k v dout", TENSOR_MAP),  # (columns, heads, tokens, batch)
    ("out other", ROWS),  # out; dq; dk and dv
    ("sums", DECAYS), ("sinks", FLOATS),  # null: none
    ("logs", OUT_FLOATS), ("dots", FLOATS),  # log2 of the sums of the exponentials; <dout, out>
    # (heads, 2 slots, ...), a slot for each block of 128 queries of each sequence:
    ("dq", OUT_FLOATS), ("added", pointer("int")),  # TILE_DQ sums over keys (place.cuh); blocks of keys in them
    ("tiles", OUT_FLOATS),  # (heads, 2 slots, blocks): sums of dz of 64 queries and a block of keys
    ("near far", OUT_FLOATS),  # of dz over the queries of each key: of its block of 128 tokens; of later ones
    ("rows", OUT_FLOATS),  # path/ in place of dq: over the keys of each query
    ("crossing", OUT_FLOATS),  # of tiles (pairs, blocks, blocks): of a block of queries, all keys before another block
    # with decays, of each slot (limit.cuh): the largest |k|; log2 of a bound of the exponentials of logits, the least l
    # of eight warps; of keys the end of the blocks of queries that give them any weight
    ("norms", FLOATS), ("bounds least", OUT_FLOATS), ("ends", INTS),
    OFFSETS,
    ("T Tk heads blocks slots section sequences", INT),  # heads: of the outputs; blocks of a sequence; place.cuh
    ("group_q group_k group_v group_s", INT),  # heads that share one of q's, k's, v's, the sinks'
    ("shared", INT),  # heads whose dk and dv are one
    ("offset window causal normalize", INT), ("scale", FLOAT),  # offset: keys before the first query's own
    ("eps constant linear quadratic", FLOAT),  # polynomial.cuh
)  # fmt: skip
GATES = Struct(  # gates.cu, norms.cu
    "softmax/GateArguments",
    ("g k", ROWS), ("sums readers", pointer("float4")), ("norms", OUT_FLOATS), ("ends", INTS),  # as there
    ("dq tiles near far rows crossing", FLOATS), ("dg", OUT_FLOATS), OFFSETS,  # dg (tokens, heads)
    ("T heads blocks slots sequences window shared", INT),
    ("pitch parts", INT),  # TILE_DQ, 0: rows and crossing, with this many parts per block of queries
)  # fmt: skip
DOTS = Struct(  # dots.cu: <dout, out> of each row; `tiles` counts become 0; ends of `pairs` heads of keys
    "softmax/DotsArguments",
    ("out dout", ROWS), ("dots", OUT_FLOATS), ("added", pointer("int")), ("rows tiles", I64),
    ("sums", DECAYS), ("bounds least", FLOATS), ("ends", pointer("int")), OFFSETS,
    ("T heads normalize pairs shared blocks slots", INT),
)  # fmt: skip
SINKS = Struct(  # sinks.cu; each: numbers of a sink in a batch row
    "softmax/SinkArguments", ("sinks logs dots", FLOATS), ("dsinks", OUT_FLOATS), ("batch each", I64),
)  # fmt: skip
PORTABLE = Struct(  # softmax_portable/; a pass of the backward leaves unused fields empty
    "softmax/PortableArguments",
    ("q k v out past_k past_v b", ROWS),  # the cache (sequences, slots, heads, width), b of width 1
    ("sums readers", DECAYS), ("sinks", FLOATS), ("logs", OUT_FLOATS),  # null: none; readers: of queries (gates.cu)
    ("parts maxima", OUT_FLOATS),  # of pieces of the keys (pieces, tokens, heads): sums of values; maximum and sum
    ("lengths counts", pointer("i64")),  # of the cache, null: none; as they were before the call
    ("dout dq dk dv", ROWS), ("dots rows near far crossing", OUT_FLOATS),  # gradients; as in ATTENTION
    OFFSETS,
    ("T Tk tokens heads sequences longest few", INT),  # tokens: of all rows; few: of the longest short sequence
    ("group_s pack tiles pieces piece", INT),  # pack: heads that share keys and values; tiles of rows; keys of a piece
    ("slots window causal normalize", INT), ("outputs appends", INT),  # blocks of cache.cu
    ("shared blocks", INT), ("scale", FLOAT),  # heads whose dk and dv are one; blocks of 128 tokens of a sequence
)  # fmt: skip
SYSTEM = Struct(  # system_*.cu: q are the w, out is r, dv are the y
    "softmax/SystemArguments",
    ("of", PORTABLE), ("beta", FLOATS), ("dbeta", OUT_FLOATS),  # (tokens, heads)
    ("solved", ROWS),  # u, or d: rows of a multiple of 16 bytes
    ("counts", pointer("int")),  # (sequences, heads): blocks that are solved
)  # fmt: skip
STICK = Struct(  # stick_*.cu
    "softmax/StickArguments",
    ("of", PORTABLE), ("marks", OUT_FLOATS), ("ends", pointer("int")),  # of pairs: stick.cuh; blocks' oldest tiles
    ("first pairs tiles", INT),  # sequences and heads of the launch; blocks of the longest sequence
)  # fmt: skip
PATH = Struct(  # path/*.cu
    "softmax/PathArguments",
    ("of", ATTENTION), ("w", TENSOR_MAP), ("beta", FLOATS),  # (B, T, key heads)
    ("factors keys maps", OUT_BYTES),  # path/place.cuh
    ("key_heads slots each", INT),  # blocks in all, rounded up for each sequence; of a sequence, unless ragged
    ("levels level", INT),  # sizes of groups, single blocks included; of groups.cu the one that it makes
    ("mapped dmapped", OUT_BYTES),  # queries as they attend to each group, and their gradients: (heads, tiles)
    ("dkeys dmaps parts", OUT_BYTES),  # gradients of keys (levels, heads, slots), of maps, of a block's factors
    ("chain", OUT_BYTES),  # of groups.cu: the maps from a part of a group to its end
    ("bases", pointer("const i64")), ("tiles", I64),  # of mapped: the first of each sequence of a ragged batch; in all
    ("dk dw", ROWS), ("dbeta", OUT_FLOATS), ("least", FLOAT),  # a strength that is nearer to 0 is this one
)  # fmt: skip
