"""Sizes of the softmax core, with their reasons."""

from __future__ import annotations

# Array calls: rows and columns of a tile. Below 128 the calls cost more than their work, above 256 a tile of one head
# leaves the second cache.
ARRAY_TILE = 128
SHORTEST_TILE = 16  # a chunk_size below this is rounded up to it, but for 1, the definition


def array_tile(chunk_size: int | str | None) -> int:
    """Tokens of a tile of array calls."""
    return max(chunk_size, SHORTEST_TILE) if isinstance(chunk_size, int) else ARRAY_TILE
