"""Which tokens each rank computes: every sequence cut at the ends of ranks, and of segments.

The cuts of segments are counted from the first token of all ranks, so that they do not depend on the ranks.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from ..runtime.values import is_whole, shown


class Piece(NamedTuple):
    """Tokens start ... stop of a rank, counted from its first; `number` counts the pieces of the sequence from 0."""

    sequence: int
    start: int
    stop: int
    number: int
    is_last: bool

    @property
    def is_first(self) -> bool:
        return not self.number

    @property
    def place(self) -> tuple[int, int]:
        return self.sequence, self.number


Pieces = list[list[Piece]]  # of each rank, in the order of the tokens


def whole(T: int, size: int) -> Pieces:
    """One piece a rank of one sequence: T tokens of this rank; how many others have does not matter."""
    return [[Piece(0, 0, T, rank, rank == size - 1)] for rank in range(size)]


def cut(fn: str, offsets: Sequence[int], lengths: Sequence[int], segment: int | None) -> Pieces:
    """The pieces of sequences that begin and end at `offsets`.   Raises ValueError for ranks that cut a segment."""
    bounds = list(itertools.accumulate(lengths, initial=0))
    step = segment or max(bounds[-1], 1)
    for rank, at in enumerate(bounds[:-1]):
        if segment is not None and at % step and at != bounds[-1]:
            raise ValueError(f"{fn}: rank {rank} begins at token {at}, expected a multiple of segment = {segment}")
    cuts, found = sorted({*bounds, *range(0, bounds[-1], step)}), [list[Piece]() for _ in lengths]
    for n, (begin, end) in enumerate(itertools.pairwise(offsets)):
        inner = cuts[bisect_right(cuts, begin) : bisect_left(cuts, end)]
        for number, (start, stop) in enumerate(itertools.pairwise([begin, *inner, end])):
            rank = min(bisect_right(bounds, start), len(lengths)) - 1
            found[rank].append(Piece(n, start - bounds[rank], stop - bounds[rank], number, stop == end))
    return found


def crossing(pieces: Pieces) -> set[int]:
    """The sequences that more than one rank has tokens of."""
    ranks = [{piece.sequence for piece in own} for own in pieces]
    return {n for own, later in itertools.combinations(ranks, 2) for n in own & later}


def check_lengths(fn: str, lengths: Sequence[int] | None, T: int, rank: int, size: int) -> list[int]:
    """The tokens of each rank.   Raises ValueError if they are not those of `size` ranks, or not T on this one."""
    if lengths is None:
        return [T] * size
    if len(lengths) != size or not all(is_whole(n, 0) for n in lengths):
        raise ValueError(f"{fn}: lengths is {shown(lengths)}, expected the tokens of each of {size} ranks")
    if lengths[rank] != T:
        raise ValueError(f"{fn}: lengths[{rank}] is {lengths[rank]}, expected T = {T}, the tokens of this rank")
    return [int(n) for n in lengths]
