"""Gradients made again: vjp of a call whose layout was there before, and its pullback, launch what the first ones did.

As again.py does it for plain calls. A forward that gradients follow is kept together with the pullbacks that were made
of it, by the layout of their cotangents: what the kernels of a pullback read are the caller's arrays, what the forward
kept for it and the cotangents. Once a pullback has been kept, the next call like it is made again, both halves; where
one of them could not be kept (something was copied or computed on the way), both go the whole way each time.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from math import prod
from typing import Any, NamedTuple

from . import again
from .again import Made
from .cores.matrix_state.cuda_calls import Watched
from .cores.matrix_state.cuda_delta_plan import SAVED
from .cuda import launch
from .cuda.repeat import Allocating, Repeat, Seen
from .ground.namespace import Array


class View(NamedTuple):
    """An array that the caller gets: which of the pool, in which shape."""

    of: int
    shape: tuple[int, ...]
    turned: bool  # given back heads first

    def __call__(self, pool: list[Array]) -> Array:
        x = pool[self.of]
        if x.shape != self.shape:
            x = x.reshape(self.shape)
        return x.swapaxes(-3, -2) if self.turned else x


class Pull(NamedTuple):
    """How a pullback is made again."""

    repeat: Repeat
    kind: Callable[..., Any]  # of the named tuple of gradients
    views: tuple[View | None, ...]


class Forward:
    """How a forward that gradients follow is made again, and its pullbacks."""

    def __init__(self, key: tuple[Any, ...], repeat: Repeat, results: tuple[View | None, ...], held: tuple[int, ...]):
        """results: out and the final state. held: of the arrays given and allocated, what the forward kept."""
        self.key, self.repeat, self.results, self.held = key, repeat, results, held
        self.pulls: dict[Hashable, Pull | None] = {}  # by the cotangents' layout; None: cannot be made again


class Held(NamedTuple):
    """A forward and the arrays of one call of it that a pullback may read."""

    forward: Forward
    arrays: list[Array]


def look(name: str, arrays: tuple[Any, ...], keywords: Mapping[str, Any]) -> tuple[Forward | None, Made | None]:
    """(the forward of a call like this one, if all its pullbacks so far can be made again; the call)."""
    made = again.look(name, arrays, keywords)[1]
    found = None if made is None else again.kept(_key(made))
    return found if found is not None and found.pulls and _sound(found) else None, made


def make(forward: Forward, made: Made, given: Iterable[Any]) -> tuple[list[Array | None], Held]:
    """([out, final state], None for what the caller does not get; what its pullback holds).

    given: arrays and options in order.
    """
    own = _own(given)
    pool = own + forward.repeat(made[1])
    return [None if view is None else view(pool) for view in forward.results], Held(
        forward, own + [pool[n] for n in forward.held])


def keep(
    name: str, arrays: tuple[Any, ...], keywords: Mapping[str, Any], kept: Any, core_out: Array | None, end: Array,
    out: Array | None, state: Array | None,
) -> Held | None:
    """What the pullback of a forward that went well holds; None if it cannot be made again.

    kept, core_out, end: what the room kept, its output where it was finished after it, its final state. out, state:
    what the caller got, None for nothing.
    """
    starts = getattr(kept.saved, "starts", None)
    if not isinstance(starts, Watched) or kept.q is not None:
        return None
    again.learn(end)
    if (made := again.look(name, arrays, keywords)[1]) is None:
        return None
    own = _own([*arrays, *keywords.values()])
    pool, key = [*own, *starts.seen.made], _key(made)
    if (forward := again.kept(key)) is None:
        places = {x.data.ptr: n for n, x in enumerate(pool)}
        try:
            results = tuple(None if x is None else _view(x, pool) for x in (out, state))
            wanted = [places[x.data.ptr] for x in _arrays(starts.starts)]
            wanted += [n for x in _arrays((kept.saved.x, core_out)) if (n := places.get(x.data.ptr)) is not None]
            held = tuple(n for n in dict.fromkeys(wanted) if n >= len(own))
            forward = Forward(key, Repeat(starts.seen, own), results, held)
        except LookupError:  # something was copied or computed on the way
            return None
    return Held(forward, own + [pool[n] for n in forward.held]) if _sound(forward) else None


def _sound(forward: Forward) -> bool:
    """Whether all pullbacks so far could be made again: else the forward would be gone through twice."""
    return None not in forward.pulls.values()


def pull(held: Held | None, cotangents: tuple[Any, ...]) -> Any:
    """The gradients of a pullback like one before; None if there is none."""
    if held is None or not held.forward.pulls or (key := _layout(cotangents)) is None:
        return None
    if (how := held.forward.pulls.get(key)) is None:
        return None
    given = [*held.arrays, *(x for x in cotangents if x is not None)]
    pool = given + how.repeat([x.data.ptr for x in given])
    return how.kind(*(None if view is None else view(pool) for view in how.views))


@contextlib.contextmanager
def watching(held: Held | None, kept: Any) -> Iterator[tuple[Any, Seen | None]]:
    """(`kept` for a backward whose launches and arrays are written down, these)."""
    if held is None:
        yield kept, None
        return
    saved = kept.saved
    with launch.written() as launches:
        xp = Allocating(saved.plan.xp)
        yield kept._replace(saved=saved._replace(plan=saved.plan._replace(xp=xp))), Seen(launches, xp.made)


def keep_pull(held: Held | None, cotangents: tuple[Any, ...], seen: Seen | None, grads: Any) -> None:
    """Keep how a pullback was made, if it can be made again; and that it cannot."""
    if held is None or seen is None or (key := _layout(cotangents)) is None or key in held.forward.pulls:
        return
    given = [*held.arrays, *(x for x in cotangents if x is not None)]
    if len({x.data.ptr for x in given}) < len(given):  # one array given twice tells nothing of a call with two
        return
    seen = Seen(seen.launches, [*seen.made, *again.made_for(seen.launches)])
    try:
        pool = [*given, *seen.made]
        views = tuple(None if x is None else _view(x, pool) for x in grads)
        held.forward.pulls[key] = Pull(Repeat(seen, given), type(grads), views)
    except LookupError:
        held.forward.pulls[key] = None
    again.put(held.forward.key, held.forward)


def unwatched(kept: Any) -> Any:
    """What a room keeps, without what it launched for that."""
    saved = kept.saved
    starts = getattr(saved, "starts", None)
    return kept._replace(saved=saved._replace(starts=starts.starts)) if isinstance(starts, Watched) else kept


def _key(made: Made) -> tuple[Any, ...]:
    return "vjp", os.environ.get(SAVED), *made[0]


def _own(given: Iterable[Any]) -> list[Array]:
    return [x for x in given if again.is_kind(x)]


def _layout(cotangents: tuple[Any, ...]) -> Hashable | None:
    """What pullbacks are found by; None if it holds anything but arrays of the kind that is made again."""
    key: list[Any] = [launch.current_device()]
    for x in cotangents:
        if x is None:
            key.append(None)
        elif again.is_kind(x):
            key.append((x.shape, x.strides, x.dtype, x.data.ptr & 15, x.data.device_id))
        else:
            return None
    return tuple(key)


def _arrays(x: Any) -> list[Array]:
    """The arrays among nested tuples."""
    if isinstance(x, tuple):
        return [y for part in x for y in _arrays(part)]
    return [x] if hasattr(x, "data") and hasattr(x, "shape") else []


def _view(x: Array, pool: list[Array]) -> View:
    """How x is got from the pool.   Raises LookupError."""
    turned = not x.flags.c_contiguous
    base = x.swapaxes(-3, -2) if turned and x.ndim > 2 else x
    for n, y in enumerate(pool):
        same = (base.data.ptr, base.dtype, prod(base.shape)) == (y.data.ptr, y.dtype, prod(y.shape))
        if same and base.flags.c_contiguous and y.flags.c_contiguous:
            return View(n, tuple(base.shape), turned)
    raise LookupError
