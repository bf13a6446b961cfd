"""States and summaries of pieces, from the ranks that computed them to all: one collective, in one buffer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from array_api_compat import device

from ..call.foreign import leaves, mapped
from .comm import Comm
from .pieces import Piece, Pieces

Place = tuple[int, int]  # (sequence, number of the piece)


def exchanged(
    xp: Any, comm: Comm, pieces: Pieces, sends: Callable[[Piece], bool], own: Mapping[Place, Any], like: Any
) -> dict[Place, Any]:
    """What all ranks have of the pieces that `sends` names, and `own`.

    Each rank sends its values, arrays or tuples of them, in one buffer padded to the longest.   like: such a value,
    whose numbers do not matter. All values are in C order: the bits of products with views depend on their strides.
    """
    found = {place: mapped(lambda x: _in_order(xp, x), value) for place, value in own.items()}
    sent = [[piece.place for piece in each if sends(piece)] for each in pieces]
    count = max(map(len, sent))
    if not count or comm.size == 1:
        return found
    arrays = [x for x in _leaves(like) if x is not None]
    size = sum(math.prod(x.shape) for x in arrays)
    flat = [xp.reshape(x, (-1,)) for place in sent[comm.rank] for x in _leaves(found[place]) if x is not None]
    padding = (count - len(sent[comm.rank])) * size
    if padding:
        flat.append(xp.zeros((padding,), dtype=arrays[0].dtype, device=device(arrays[0])))
    every = comm.all_gather(xp.concat(flat))
    for rank, places in enumerate(sent):
        for n, place in enumerate(places):
            if rank != comm.rank:
                found[place] = _filled(xp, every[rank, n * size : (n + 1) * size], like)
    return found


def _leaves(x: Any) -> list[Any]:
    return leaves(x) if isinstance(x, tuple) else [x]


def _in_order(xp: Any, x: Any) -> Any:
    """x in C order, without a copy where it is."""
    return None if x is None else xp.reshape(xp.reshape(x, (-1,)), x.shape)


def _filled(xp: Any, row: Any, like: Any) -> Any:
    """The value whose numbers are a row."""
    at = 0

    def next_one(x: Any) -> Any:
        nonlocal at
        if x is None:
            return None
        begin, at = at, at + math.prod(x.shape)
        return xp.reshape(row[begin:at], x.shape)

    return mapped(next_one, like)
