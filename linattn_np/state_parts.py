"""A state as its parts: most variants have one array, some a named tuple of them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from .card import Card
from .cores.matrix_state.inputs import Plan
from .ground.memory import Place, is_on_device, overlap, overlaps_itself, place_of
from .ground.namespace import NARROW, dtype_name


def pair(card: Card, name: str, state: Any, options: dict[str, Any]) -> Any:
    """A state as the variant takes it: one array, or its named tuple from any tuple as long."""
    kind = card.state(options)
    if not isinstance(state, tuple):
        return state
    if kind is None:
        raise TypeError(f"{card.name}: {name} is a {type(state).__qualname__}, expected one array (..., H, K, V)")
    if len(state) != len(kind._fields) or any(S is None for S in state):
        count = {2: "two", 3: "three"}[len(kind._fields)]
        raise TypeError(f"{card.name}: {name} is a {type(state).__qualname__} of {len(state)}, "
                        f"expected {count} arrays ({', '.join(kind._fields)}) as a {kind.__name__}")
    return kind(*state)


def by_name(card: Card, arrays: tuple[Any, ...], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays and state by name, as the caller gave them."""
    given = dict(zip(card.arrays, arrays, strict=False))
    given |= {n: x for n, x in keywords.items() if n in card.arrays}
    return given | parts("state", pair(card, "state", keywords.get("state"), {**card.options, **keywords}))


def parts(name: str, state: Any) -> dict[str, Any]:
    """The arrays of a state under their names."""
    if not isinstance(state, tuple):
        return {name: state}
    fields: Any = state  # a named tuple
    return {f"{name}.{n}": S for n, S in fields._asdict().items()}


def whole(like: Any, each: list[Any]) -> Any:
    """The transpose of parts."""
    return type(like)(*each) if isinstance(like, tuple) else each[0]


def stored(state: Any) -> dict[str, str]:
    """Which arrays of a state are kept in 16 bits, and in which dtype."""
    each = {name: dtype_name(S) for name, S in parts("state", state).items() if S is not None}
    return {name: kind for name, kind in each.items() if kind in NARROW}


def check_overwritten(fn: str, state: Any, plan: Plan, own: Any) -> None:
    """Whether a final state can be written where `state` lies; own: as the caller gave it.

    Raises TypeError for a dtype that is neither the computation's nor stored in 16 bits, ValueError for what is
    read-only and for elements that share memory.
    """
    for name, S in parts("state", own).items():
        if not getattr(getattr(S, "dtype", None), "isnative", True):
            raise TypeError(f"{fn}: {name} is byte-swapped, expected this machine's byte order to be overwritten")
    for name, S in parts("state", state).items():
        if S.dtype != plan.dtype and dtype_name(S) not in NARROW:
            wanted = dtype_name(plan.xp.empty(0, dtype=plan.dtype))
            raise TypeError(f"{fn}: {name} has dtype {dtype_name(S)}, expected {wanted} to be overwritten")
        if getattr(getattr(S, "flags", None), "writeable", True) is False:
            raise ValueError(f"{fn}: {name} is read-only, expected a writeable array with overwrite_state=True")
    _check_apart(fn, {name: place_of(S) for name, S in parts("state", state).items()})


def _check_apart(fn: str, places: dict[str, Place | None]) -> None:
    """Every element of a state that is overwritten has memory of its own, as far as the library tells where it lies."""
    told = {name: place for name, place in places.items() if place is not None}
    for name, place in told.items():
        if overlaps_itself(place):
            raise ValueError(f"{fn}: {name} has elements that share memory (shape {place.shape}, strides "
                             f"{place.strides} bytes), expected memory of its own for each with overwrite_state=True")
    for (one, a), (other, b) in itertools.combinations(told.items(), 2):
        if overlap(a, b):
            raise ValueError(f"{fn}: {one} and {other} share memory, expected memory of its own for each with "
                             "overwrite_state=True")


def check_inputs_apart(fn: str, state: Any, given: dict[str, Any]) -> None:
    """A CUDA kernel writes a state while others still read: it may not lie where an input does (NumPy's may)."""
    for name, S in parts("state", state).items():
        if not is_on_device(S):
            continue
        for other, x in given.items():
            if x is not None and overlap(place_of(S), place_of(x)):
                raise ValueError(f"{fn}: {name} and {other} share memory, expected a state apart from the inputs with "
                                 "overwrite_state=True")
