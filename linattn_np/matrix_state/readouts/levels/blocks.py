"""Blocks of 2^l positions: which tokens write and which read at a level, as plain integers and NumPy masks.

    level(i, j) = bit_length(i xor j), 0 for i = j, positions counted from 0

Token j is at level l for token i > j where both are in one block [n 2^l, (n + 1) 2^l), j in its first half and i in its
second one. For j < p <= i, level(i, j) = max(level(i, p), level(p, j)).
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ....runtime.shapes import Sequence


class Span(NamedTuple):
    """Tokens start..stop of the packed row; `first` is the position of the first one."""

    start: int
    stop: int
    first: int

    @property
    def last(self) -> int:
        """The position after the last token."""
        return self.first + self.stop - self.start


class Blocks(NamedTuple):
    """A level: its blocks as sequences of the packed row, and what it has of the states before and after each span."""

    sequences: tuple[Sequence, ...]
    writes: np.ndarray  # (tokens,) in the first half of a block
    reads: np.ndarray  # (tokens,) in the second half
    begins: list[int]  # number of the first block of each span
    ends: list[int]  # and of the last one
    merges: list[bool]  # a span begins in a first half: its state is the sum of all levels below this one
    stays: list[bool]  # a span ends in a second half: the state of this level is there after it

    @property
    def is_needed(self) -> bool:
        """Whether a token reads, or a state stays."""
        return bool(self.reads.any()) or any(self.stays)


def positions(spans: Items[Span]) -> np.ndarray:
    """The position of every token of the packed row."""
    return np.concatenate([np.arange(s.first, s.last) for s in spans] or [np.zeros(0, np.int64)])


def blocks(level: int, spans: Items[Span]) -> Blocks:
    """The blocks of 2^level positions, cut at the ends of each span; an empty span is one empty block."""
    size, found, begins, ends = 1 << level, list[Sequence](), list[int](), list[int]()
    for start, stop, first in spans:
        begins.append(len(found))
        cuts = [start, *range(start + size - first % size, stop, size), stop]
        found += [Sequence(len(found) + n, a, b) for n, (a, b) in enumerate(pairwise(cuts))]
        ends.append(len(found) - 1)
    second = bit(positions(spans), level)
    merges, stays = ([not bit(p, level) for p in of] for of in ([s.first for s in spans], [s.last for s in spans]))
    return Blocks(tuple(found), ~second, second, begins, ends, merges, [not m for m in stays])


def bit(position: np.ndarray | int, level: np.ndarray | int) -> np.ndarray:
    """Whether a position is in the second half of its block of 2^level: states of this level are then not empty."""
    return (np.asarray(position) >> (level - 1)) & 1 == 1


def level_of(i: np.ndarray, j: np.ndarray) -> np.ndarray:
    """bit_length(i xor j)."""
    return np.frexp((i ^ j).astype(np.float64))[1]  # exact below 2^53


def one_hot(levels: np.ndarray, n: int) -> np.ndarray:
    """(..., n, J) of (..., J): 1 where levels[..., j] = n."""
    return (levels[..., None, :] == np.arange(n)[:, None]).astype(np.float64)


def chunk_rows(spans: Items[Span], C: int) -> np.ndarray:
    """(chunks, C): the token at each position of the aligned chunks that the spans touch; -1 where there is none."""
    rows = [np.zeros((0, C), np.int64)]
    for start, stop, first in spans:
        if stop > start:
            at = np.full(-(-(first % C + stop - start) // C) * C, -1)
            at[first % C :][: stop - start] = np.arange(start, stop)
            rows.append(at.reshape(-1, C))
    return np.concatenate(rows)


def heads_of(spans: Items[Span], C: int) -> list[Span]:
    """The tokens of each span up to the first end of a chunk."""
    return [Span(s.start, min(s.stop, s.start + -s.first % C), s.first) for s in spans]


def tails_of(spans: Items[Span], C: int) -> list[Span]:
    """The tokens of each span from the last begin of a chunk."""
    starts = [max(s.start, s.stop - s.last % C) for s in spans]
    return [Span(a, s.stop, s.last - (s.stop - a)) for a, s in zip(starts, spans, strict=True)]


def live(position: np.ndarray, n: int) -> np.ndarray:
    """(..., n): whether a state has tokens in the levels 1 .. n after `position` tokens."""
    return (position[..., None] >> np.arange(n)) & 1 == 1
