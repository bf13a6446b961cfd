"""A NumPy call like one before it: what shapes, strides, dtypes and options settle is settled once.

A step of decoding takes less time than checking its arguments, and so does a short sequence. So a call that went well
is remembered under all that its checks depend on; the next one alike goes straight to the kernel. Only calls in which
nothing but the numbers in the arrays is left to know are looked up here: NumPy arrays, no ragged batch, a variant whose
variables are the core's. The room decides which of them its compiled loops can do again.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import numpy as np

from .card import Card
from .cores import matrix_state
from .cores.matrix_state.inputs import Inputs, Plan
from .ground.handles import address

MOST = 256  # calls that are remembered
_known: dict[Hashable, Any] = {}


class Likeness(NamedTuple):
    """All that settles a call but for the numbers in its arrays, and these arrays, the state apart."""

    key: Hashable
    given: list[np.ndarray]
    state: np.ndarray | None


def likeness(card: Card, arrays: tuple[Any, ...], keywords: Mapping[str, Any]) -> Likeness | None:
    """What a call is like; None where more than this settles it."""
    state = keywords.get("state")
    if not (state is None or type(state) is np.ndarray):
        return None
    if keywords.get("cu_seqlens") is not None or keywords.get("state_rows") is not None:
        return None
    if card.pack_state or card.from_core or keywords.get("layout", "time_first") != "time_first":
        return None
    parts: list[Any] = [card.name, state is not None and state.flags.writeable]
    given: list[np.ndarray] = []
    for x in arrays:
        if type(x) is np.ndarray:
            parts += (x.shape, x.strides, x.dtype)
            given.append(x)
        elif x is None:
            parts.append(None)
        else:
            return None
    for name, x in keywords.items():
        kind = type(x)
        if kind is np.ndarray:
            parts += (name, x.shape, x.strides, x.dtype)
            if x is not state:
                given.append(x)
        elif x is None or kind is bool or kind is int or kind is float or kind is str:
            parts += (name, kind, x)  # True is equal to 1, but not as good
        else:
            return None
    return Likeness(tuple(parts), given, state)


def repeat(like: Likeness) -> tuple[Any, Any] | None:
    """(out, final state) of a call like one before; None if there is none, or it must be done in full."""
    call = _known.get(like.key)
    return None if call is None else call(like.given, like.state)


def remember(like: Likeness, inputs: Inputs, plan: Plan, kept: matrix_state.Kept) -> None:
    """Keep a call that went well, if it can be done again for other numbers.

    One array given twice tells nothing of a call with two.
    """
    arrays = like.given if like.state is None else [*like.given, like.state]
    if like.key not in _known and len({address(y) for y in arrays}) == len(arrays):
        if len(_known) >= MOST:
            _known.clear()
        _known[like.key] = matrix_state.again(inputs, plan, like.state, kept, like.given)
