"""Sizes of the softmax core, with their reasons."""

from __future__ import annotations

import os

# Array calls: rows and columns of a tile. Below 128 the calls cost more than their work, above 256 a tile of one head
# leaves the second cache.
ARRAY_TILE = 128
SHORTEST_TILE = 16  # a chunk_size below this is rounded up to it, but for 1, the definition
FEW_TOKENS = 8  # up to this many tokens, PaTH maps its cache token by token: 4 K operations per key


def array_tile(chunk_size: int | str | None) -> int:
    """Tokens of a tile of array calls."""
    return max(chunk_size, SHORTEST_TILE) if isinstance(chunk_size, int) else ARRAY_TILE


# Compiled loops: queries and keys of a tile. Its logits, keys and values stay in the first two caches, and reading a
# block of keys is a fiftieth of the products with it.
CPU_TILE = 64
LONGEST_CPU_TILE = 256
FEW_ROWS = 4  # queries from which on k is transposed; fewer form inner products
CPU_ROWS = 256  # queries of a forward task
APPENDED_SLOTS, APPENDED_ROWS = 256, 16  # slots of a task that copies a cache; rows of all heads at a time
FEW_OPERATIONS = 2e6  # of a call: below, threads cost more than they give
MANY_OPERATIONS = 2e9  # a longer call is split after this many, a fraction of a second, so that it can be interrupted

# PaTH: queries pass a block of keys by a product with R (K, K), or by its factors W and U where 2 C < K
PRODUCTS, FACTORS = 1, 2


def cpu_tile(chunk_size: int | str | None) -> tuple[int, int]:
    """(queries, keys) of a tile of the compiled loops."""
    C = min(chunk_size, LONGEST_CPU_TILE) if isinstance(chunk_size, int) else CPU_TILE
    return C, C if C > 1 else CPU_TILE


# CUDA kernels: queries of a block; the widest keys and values; bytes of keys and values (or queries and cotangents) of
# concurrent heads, most of which fit in the second-level cache.
CUDA_TILE = 128
WIDEST_CUDA = 128
SECTION_BYTES = 32 * 2**20

# Portable kernels, by products of warps: the widest keys and values; tokens of a sequence whose keys are read in
# pieces, each by a block, where there is a cache (blocks of more queries fill a device); keys of a tile and tiles in
# flight, the first that fits two blocks, else one.
PORTABLE = os.environ.get("LINATTN_CUDA_PORTABLE", "0") not in ("", "0")  # the portable kernels only
WIDEST_PORTABLE = 256
FEW_QUERIES = 16
PORTABLE_TILES = ((64, 3), (64, 2), (32, 3), (32, 2), (16, 2))
PORTABLE_BLOCKS = ((64, 32), (64, 16), (32, 32), (32, 16), (16, 16))  # of gradients: rows of a block, rows of a tile
SYSTEM_ROWS = (64, 32, 16)  # of a block of a linear system
STICK_ROWS = (64, 32, 16)  # tokens of a block
STICK_BYTES, LONGEST_STICK = (
    2**28,
    2**16,
)  # checkpoints of a batch of heads, bytes; longest sequence whose checkpoints fit
SHORTEST_PIECE, MOST_PIECES = 128, 32  # keys of a piece; pieces of a cache (cache.cu has 64 weights of pieces)


def piece(keys: int) -> int:
    """Keys per piece for this number of keys: a power of two."""
    return max(SHORTEST_PIECE, 1 << (-(-keys // MOST_PIECES) - 1).bit_length())
