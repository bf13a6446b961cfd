"""Calls made again: of a call whose shapes, strides, dtypes and options were there before, only the pointers are new.

A step takes microseconds on a GPU, and checking and planning it many times that. So what a call launched is kept under
everything that it was decided from, and the next one like it fills in its pointers and launches. Kept are only calls
that passed every check, launched one kernel (cores/matrix_state/cuda_step.py) on the caller's own memory, and gave back
what the kernel wrote; all others go the whole way every time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .cores.matrix_state.cuda_step import (
    END,
    NAMES_OF_ARGUMENTS,
    OFFSETS,
    OUT,
    POINTERS,
    START,
    STEP,
    Launched,
)
from .cuda import launch
from .ground.namespace import Array

MOST = 512  # calls that are kept
PLAIN = frozenset((bool, int, float, str))  # options that a call is found by

_made: dict[tuple[Any, ...], Again] = {}
_kind: type | None = None  # of the arrays: CuPy's, once a call has launched a step


class Again(NamedTuple):
    """How to make a call again."""

    fire: Callable[..., None]  # of the pointers
    sources: tuple[tuple[int, int], ...]  # (pointer, number of the array among those given)
    out: tuple[tuple[int, ...], Any] | None  # shape and dtype of what is allocated
    end: tuple[tuple[int, ...], Any] | None
    state: int | None  # number of the state that is overwritten
    turned: bool  # out is given back heads first
    pair: bool  # the caller gets (out, state), else out


class Made(NamedTuple):
    """A call as it was given: what it is found by, and its arrays in order."""

    key: tuple[Any, ...]
    arrays: list[Array]


def look(name: str, arrays: tuple[Any, ...], keywords: Mapping[str, Any]) -> tuple[Again | None, Made | None]:
    """(how a call like this one was made, what it is found by): None if it holds more than CuPy arrays and options."""
    kind = _kind
    if kind is None:
        return None, None
    key: list[Any] = [name, launch.current_device()]
    given: list[Array] = []
    for x in arrays:
        if type(x) is kind:
            data = x.data
            key += (x.shape, x.strides, x.dtype, data.ptr & 15, data.device_id)
            given.append(x)
        elif x is None:
            key.append(None)
        else:
            return None, None
    for n, x in keywords.items():
        if type(x) is kind:
            data = x.data
            key += (n, x.shape, x.strides, x.dtype, data.ptr & 15, data.device_id)
            given.append(x)
        elif x is None or type(x) in PLAIN:
            key += (n, type(x), x)
        else:
            return None, None
    made = Made(tuple(key), given)
    return _made.get(made.key), made


def make(how: Again, given: list[Array]) -> tuple[Array | None, Array | None]:
    """(out, state) of a call like the one that `how` was kept of."""
    pointers, out, end = [0] * len(NAMES_OF_ARGUMENTS), None, None
    for pointer, n in how.sources:
        pointers[pointer] = given[n].data.ptr
    if how.out is not None:
        out = launch.empty(*how.out)
        pointers[OUT] = out.data.ptr
    if how.end is not None:
        end = launch.empty(*how.end)
        pointers[END] = end.data.ptr
    elif how.state is not None:
        end = given[how.state]
    how.fire(*pointers)
    return out.swapaxes(-3, -2) if how.turned else out, end


def keep(made: Made | None, did: Any, out: Array | None, state: Array | None, overwrite: bool) -> None:
    """Keep how a call was made, if it can be made again.

    did: what the backend saved. out, state: what the caller got, None for nothing.
    """
    global _kind
    if not isinstance(did, Launched):
        return
    _kind = type(did.arrays[0 if did.arrays[0] is not None else 1])
    wrote, start, end = did.arrays[OUT], did.arrays[START], did.arrays[END]
    in_place = end is start
    if made is None or did.arrays[OFFSETS] is not None or overwrite != in_place:
        return
    if not _is(out, wrote) or not (in_place or state is None or _is(state, end)):
        return
    given = {x.data.ptr: n for n, x in enumerate(made.arrays)}
    if len(given) < len(made.arrays):  # one array under two names may be two the next time
        return
    sources = {}
    for pointer, array in enumerate(did.arrays):
        if array is None or pointer == OUT or (pointer == END and not in_place):
            continue
        if array.data.ptr not in given:  # a copy
            return
        sources[pointer] = given[array.data.ptr]
    if len(_made) >= MOST:
        _made.clear()
    _made[made.key] = Again(
        launch.Launcher(
            STEP, "step", did.constants, did.blocks, did.threads, 0, bytes(POINTERS.size) + did.tail, POINTERS
        ),
        tuple(sources.items()),
        None if wrote is None else (wrote.shape, wrote.dtype),
        None if in_place or state is None else (state.shape, state.dtype),
        sources[END] if in_place else None, wrote is not None and out.shape != wrote.shape, state is not None,
    )


def _is(got: Array | None, wrote: Array | None) -> bool:
    """Whether the caller got what the kernel wrote, perhaps with time and heads exchanged."""
    if got is None or wrote is None:
        return got is wrote
    return got.data.ptr == wrote.data.ptr and got.size == wrote.size and got.dtype == wrote.dtype
