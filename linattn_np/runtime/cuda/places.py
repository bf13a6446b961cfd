"""Where the results of a recorded call are: arrays that its launches make, and views of them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from .record import FEW_BYTES, LaunchSequence, View, view_of

Array = Any


def positions(x: Any, pool: list[Array]) -> Any:
    """How `get` finds x, None or an array or a named tuple of arrays, in a pool: by index if it is one of them.

    Raises LookupError if it is not a view of one.
    """
    return _whole(view_of(x, pool), pool)


def _whole(view: Any, pool: list[Array]) -> Any:
    """A view, or the index of the array that it is."""
    if isinstance(view, View):
        same = not view.transposed and view.shape == tuple(pool[view.of].shape)
        return view.of if same else view
    return None if view is None else (view[0], tuple(_whole(part, pool) for part in view[1]))


def _as_array(position: Any, sequence: LaunchSequence, first: int, known: set[int]) -> Any:
    """A position, of arrays that the sequence makes in the shape that the caller gets.

    first: the index in the pool of the first of them. known: indices of those that other results refer to; updated.
    """
    if isinstance(position, View):
        n = position.of
        if n >= first and n not in known and not position.transposed:
            sequence.allocations[n - first] = position.shape, sequence.allocations[n - first][1]
            position = n
        known.add(n)
    elif isinstance(position, tuple):
        position = position[0], tuple(_as_array(part, sequence, first, known) for part in position[1])
    elif position is not None:
        known.add(position)
    return position


def place_results(
    results: Sequence[Any], sequence: LaunchSequence, first: int, held: Collection[int] = (), few: bool = False
) -> tuple[Any, ...]:
    """The positions of results, with arrays of their shapes; the arrays of one result share memory.

    held: allocated arrays whose memory is read later. few: whether small results share memory too.
    """
    known = set[int]()
    found = tuple(_as_array(x, sequence, first, known) for x in results)
    together = [{n - first for n in places(x) if n >= first} for x in found]
    if few:
        small = {n for one in together for n in one if sequence.bytes_of(n) <= FEW_BYTES}
        together = [small, *(one - small for one in together)]
    sequence.keep(together, held)
    return found


def places(position: Any) -> set[int]:
    """The indices of the pool that a position, or a named tuple of positions, refers to."""
    if position is None or type(position) is int:
        return set() if position is None else {position}
    return {position.of} if type(position) is View else {n for part in position[1] for n in places(part)}
