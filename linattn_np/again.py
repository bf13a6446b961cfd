"""Calls made again: of a call whose shapes, strides, dtypes and options were there before, only the pointers are new.

A small call takes microseconds on a GPU, and checking and planning it many times that. So what a call launched is kept
under everything that it was decided from, and the next one like it launches the same with its own pointers. Kept are
calls that passed every check, did nothing on the device but launch kernels on the caller's own memory, and gave back
what these wrote (cuda/repeat.py); all others go the whole way every time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .cores.matrix_state.cuda_calls import Watched
from .cuda import launch
from .cuda.repeat import Repeat, Seen
from .ground.namespace import Array

MOST = 512  # calls that are kept
PLAIN = frozenset((bool, int, float, str))  # options that a call is found by

_made: dict[tuple[Any, ...], Any] = {}
_kind: Any = None  # of the arrays: CuPy's, once a call has launched something that can be launched again
_device: Callable[[], int]  # the device that is current then


class Again:
    """How to make a call again, and which of the arrays it allocates the caller gets."""

    __slots__ = ("mine", "out", "repeat", "state", "turned")

    def __init__(self, repeat: Repeat, out: tuple[int | None, bool], state: int | None, mine: bool):
        """out: (which of the arrays, whether it is given back heads first). mine: the state is the caller's own."""
        self.repeat, (self.out, self.turned) = repeat, out
        self.state, self.mine = state, mine

    def __call__(self, pointers: list[int], keywords: Mapping[str, Any]) -> tuple[Array | None, Array | None]:
        """(out, state) as the caller gets them, of a call that `look` found; None for nothing."""
        made = self.repeat(pointers)
        out: Any = None if self.out is None else made[self.out]
        if self.turned:
            out = out.swapaxes(-3, -2)
        return out, keywords["state"] if self.mine else None if self.state is None else made[self.state]


Made = tuple[tuple[Any, ...], list[int]]  # what a call is found by, and its arrays' pointers in order


def look(name: str, arrays: tuple[Any, ...], keywords: Mapping[str, Any]) -> tuple[Again | None, Made | None]:
    """(how a call like this one was made, the call): None if it holds more than CuPy arrays and options.

    A dense array has the strides of its shape, which are not asked for then.
    """
    kind = _kind
    if kind is None:
        return None, None
    device, low = _device(), 0
    parts: list[Any] = [name, device]
    pointers: list[int] = []
    for x in arrays:
        if type(x) is kind:
            data = x.data
            if data.device_id != device:
                return None, None
            pointer = data.ptr
            low |= pointer
            parts += x.shape, x._c_contiguous or x.strides, x.dtype
            pointers.append(pointer)
        elif x is None:
            parts.append(None)
        else:
            return None, None
    for n, x in keywords.items():
        if type(x) is kind:
            data = x.data
            if data.device_id != device:
                return None, None
            pointer = data.ptr
            low |= pointer
            parts += n, x.shape, x._c_contiguous or x.strides, x.dtype
            pointers.append(pointer)
        elif x is None or type(x) in PLAIN:
            parts += n, type(x), x
        else:
            return None, None
    if low & 15:
        parts += [pointer & 15 for pointer in pointers]
    key = tuple(parts)
    return _made.get(key), (key, pointers)


def keep(
    made: Made | None, given: Sequence[Any], kept: Any, end: Any, out: Array | None, state: Array | None, mine: bool
) -> None:
    """Keep how a call was made, if it can be made again.

    given: its arrays and options in order. kept, end: what the backend kept and its final state. out, state: what the
    caller got, None for nothing. mine: `end` is the caller's own array, the one given as `state`.
    """
    if not isinstance(kept, Watched):
        return
    learn(end)
    if made is None or (mine and not any(x is end for x in given)):
        return
    try:
        repeat = Repeat(kept.seen, [x for x in given if type(x) is _kind])
        where = None if state is None or mine else _place(state, kept.seen.made)
        how = Again(repeat, _out(out, kept.seen.made), where, mine and state is not None)
    except LookupError:  # something was copied or computed on the way
        return
    put(made[0], how)


def between(before: list[launch.Written], kept: Any, after: list[launch.Written]) -> Any:
    """What a room keeps of a call, its own launches being between these."""
    starts = getattr(kept.saved, "starts", None)
    if not (before or after) or not isinstance(starts, Watched):
        return kept
    seen = Seen([*before, *starts.seen.launches, *after], [*made_for(before), *starts.seen.made, *made_for(after)])
    return kept._replace(saved=kept.saved._replace(starts=starts._replace(seen=seen)))


def made_for(launches: list[launch.Written]) -> list[Array]:
    """The arrays that were allocated for launches before anybody listed them."""
    return [y for one in launches for y in one.made]


def learn(x: Array) -> None:
    """Calls with arrays like x are made again."""
    global _kind, _device
    if hasattr(type(x), "_c_contiguous"):  # of CuPy's arrays, as cheap as nothing else that tells of strides
        _device, _kind = launch.device_function(), type(x)


def is_kind(x: Any) -> bool:
    """Whether calls with an array like x are made again."""
    return type(x) is _kind


def put(key: tuple[Any, ...], how: Any) -> None:
    """Keep how something was made under what it is found by."""
    if len(_made) >= MOST:
        _made.clear()
    _made[key] = how


def kept(key: tuple[Any, ...]) -> Any:
    """How something found by this was made, or None."""
    return _made.get(key)


def forget() -> None:
    """Every call is planned anew."""
    _made.clear()


def _out(out: Array | None, made: list[Array]) -> tuple[int | None, bool]:
    """(which of the arrays out is, whether with time and heads exchanged)."""
    if out is None:
        return None, False
    try:
        return _place(out, made), False
    except LookupError:
        return _place(out.swapaxes(-3, -2), made), True


def _place(x: Array, made: list[Array]) -> int:
    """Which of the arrays, all dense, x is.   Raises LookupError."""
    for n, y in enumerate(made):
        if x.flags.c_contiguous and (x.data.ptr, x.shape, x.dtype) == (y.data.ptr, y.shape, y.dtype):
            return n
    raise LookupError
