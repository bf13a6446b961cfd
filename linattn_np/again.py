"""Calls made again: of a call whose shapes, strides, dtypes and options were there before, only the pointers are new.

A small call takes microseconds on a GPU, and checking and planning it many times that. So what a call launched is kept
under everything that it was decided from, and the next one like it launches the same with its own pointers. Kept are
calls that passed every check, did nothing on the device but launch kernels on the caller's own memory, and gave back
what these wrote (cuda/repeat.py); all others go the whole way every time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from .cores.matrix_state.cuda_calls import Watched
from .cuda import launch
from .cuda.repeat import Repeat
from .ground.namespace import Array

MOST = 512  # calls that are kept
PLAIN = frozenset((bool, int, float, str))  # options that a call is found by

_made: dict[tuple[Any, ...], Again] = {}
_kind: Any = None  # of the arrays: CuPy's, once a call has launched a step


class Again(NamedTuple):
    """How to make a call again, and which of the arrays given and allocated the caller gets."""

    repeat: Repeat
    out: int | None
    turned: bool  # out is given back heads first
    state: int | None


class Made(NamedTuple):
    """A call as it was given: what it is found by, and its arrays in order."""

    key: tuple[Any, ...]
    arrays: list[Array]
    pointers: list[int]


def look(name: str, arrays: tuple[Any, ...], keywords: Mapping[str, Any]) -> tuple[Again | None, Made | None]:
    """(how a call like this one was made, what it is found by): None if it holds more than CuPy arrays and options."""
    kind = _kind
    if kind is None:
        return None, None
    key: list[Any] = [name, launch.current_device()]
    given: list[Array] = []
    pointers: list[int] = []
    for x in arrays:
        if type(x) is kind:
            data = x.data
            pointer = data.ptr
            key += (x.shape, x.strides, x.dtype, pointer & 15, data.device_id)
            given.append(x)
            pointers.append(pointer)
        elif x is None:
            key.append(None)
        else:
            return None, None
    for n, x in keywords.items():
        if type(x) is kind:
            data = x.data
            pointer = data.ptr
            key += (n, x.shape, x.strides, x.dtype, pointer & 15, data.device_id)
            given.append(x)
            pointers.append(pointer)
        elif x is None or type(x) in PLAIN:
            key += (n, type(x), x)
        else:
            return None, None
    made = Made(tuple(key), given, pointers)
    return _made.get(made.key), made


def make(how: Again, made: Made) -> tuple[Array | None, Array | None]:
    """What the caller gets, out and state, of a call like the one that `how` was kept of; None for nothing."""
    pool = made.arrays + how.repeat(made.pointers)
    out: Any = None if how.out is None else pool[how.out]
    return out.swapaxes(-3, -2) if how.turned else out, None if how.state is None else pool[how.state]


def keep(made: Made | None, kept: Any, end: Any, out: Array | None, state: Array | None, in_place: bool) -> None:
    """Keep how a call was made, if it can be made again.

    kept, end: what the backend kept and its final state. out, state: what the caller got, None for nothing.
    in_place: `end` is the caller's own array.
    """
    global _kind
    if not isinstance(kept, Watched):
        return
    _kind = type(end)
    if made is None:
        return
    pool = [*made.arrays, *kept.seen.made]
    try:
        if in_place:
            _place(end, pool[: len(made.arrays)])
        how = Again(Repeat(kept.seen, made.arrays), *_out(out, pool), None if state is None else _place(state, pool))
    except LookupError:  # something was copied or computed on the way
        return
    if len(_made) >= MOST:
        _made.clear()
    _made[made.key] = how


def forget() -> None:
    """Every call is planned anew."""
    _made.clear()


def _out(out: Array | None, pool: list[Array]) -> tuple[int | None, bool]:
    """(which of the pool out is, whether with time and heads exchanged)."""
    if out is None:
        return None, False
    try:
        return _place(out, pool), False
    except LookupError:
        return _place(out.swapaxes(-3, -2), pool), True


def _place(x: Array, pool: list[Array]) -> int:
    """Which of the pool x is.   Raises LookupError."""
    for n, y in enumerate(pool):
        if (x.data.ptr, x.shape, x.dtype) == (y.data.ptr, y.shape, y.dtype):
            return n
    raise LookupError
