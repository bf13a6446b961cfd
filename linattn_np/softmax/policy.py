"""Sizes of the softmax core, with their reasons."""

from __future__ import annotations

# Array calls: rows and columns of a tile. Below 128 the calls cost more than their work, above 256 a tile of one head
# leaves the second cache.
ARRAY_TILE = 128
SHORTEST_TILE = 16  # a chunk_size below this is rounded up to it, but for 1, the definition
FEW_TOKENS = 8  # a cache of PaTH is multiplied by the maps of so many tokens one by one, 4 K operations for a key


def array_tile(chunk_size: int | str | None) -> int:
    """Tokens of a tile of array calls."""
    return max(chunk_size, SHORTEST_TILE) if isinstance(chunk_size, int) else ARRAY_TILE


# Compiled loops: queries and keys of a tile. Its logits, keys and values stay in the first two caches, and reading a
# block of keys is a fiftieth of the products with it.
CPU_TILE = 64
LONGEST_CPU_TILE = 256
FEW_ROWS = 4  # queries from which on k is transposed; fewer form inner products
CPU_ROWS = 256  # queries of a forward task
FEW_OPERATIONS = 2e6  # of a call: below, threads cost more than they give
MANY_OPERATIONS = 2e9  # after so many, a fraction of a second, a call can be interrupted

# PaTH: queries pass a block of keys by a product with R (K, K), or by its factors W and U where 2 C < K
PRODUCTS, FACTORS = 1, 2


def cpu_tile(chunk_size: int | str | None) -> tuple[int, int]:
    """(queries, keys) of a tile of the compiled loops."""
    C = min(chunk_size, LONGEST_CPU_TILE) if isinstance(chunk_size, int) else CPU_TILE
    return C, C if C > 1 else CPU_TILE

