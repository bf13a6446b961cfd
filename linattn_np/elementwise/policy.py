"""Sizes of the compiled loops, and whether kernels take CuPy arrays by default."""

from __future__ import annotations

SEGMENT, CACHED = 64, 2**16  # tokens between kept states, at most; numbers of a segment, which lie in the second cache
LEAST = 8  # tokens: kept states are at most an eighth of the inputs
LEAST_LINES = 4  # of memory, of a task: results of two threads do not share one


def segment(width: int) -> int:
    """Tokens between kept states of so many numbers."""
    return max(min(SEGMENT, CACHED // max(width, 1)), LEAST)


CUDA = True  # kernels compute calls on CuPy arrays that ask for no other backend
