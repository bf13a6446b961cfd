"""Equal and ragged batches become the same table: rows (sequence, start, stop)."""

from __future__ import annotations

import itertools
from typing import NamedTuple


class Sequence(NamedTuple):
    """Tokens start..stop of the packed row; `row` is the row of the state, None where the batch is not ragged."""

    row: int | None
    start: int
    stop: int


class Chunk(NamedTuple):
    """Tokens start..stop."""

    start: int
    stop: int


def sequences(T: int, offsets: list[int] | None) -> list[Sequence]:
    """One sequence a pair of neighbouring offsets (equal neighbours: an empty one); one in all without offsets."""
    if offsets is None:
        return [Sequence(None, 0, T)]
    return [Sequence(n, a, b) for n, (a, b) in enumerate(itertools.pairwise(offsets))]


def chunks(sequence: Sequence, C: int) -> list[Chunk]:
    """The chunks of C tokens of a sequence, the last one shorter if need be."""
    return [Chunk(s, min(s + C, sequence.stop)) for s in range(sequence.start, sequence.stop, C)]
