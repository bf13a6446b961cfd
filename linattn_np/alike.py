"""A NumPy call like one before it: what shapes, strides, dtypes and options settle is settled once.

A step of decoding takes less time than checking its arguments, and so does a short sequence. So a call that went well
is remembered under all that its checks depend on; the next one alike goes straight to the kernel. Only calls in which
nothing but the numbers in the arrays is left to know are looked up here: NumPy arrays, no ragged batch, a variant whose
variables are the core's, or that says itself how to do it again. The room decides which of them its compiled loops can
do again.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np

from .card import Card
from .cores import matrix_state
from .cores.matrix_state.inputs import Inputs, Plan
from .ground.handles import address

MOST = 256  # calls that are remembered
PLAIN = frozenset((bool, int, float, str))  # options that a call is found by
RAGGED = ("cu_seqlens", "state_rows")  # arrays whose numbers settle the call
ndarray = np.ndarray
_known: dict[Hashable, Any] = {}


Likeness = tuple[tuple[Any, ...], list[np.ndarray], Any]
# all that settles a call but for the numbers in its arrays; these arrays, the state apart; the state, one or several


def likeness(card: Card, arrays: tuple[Any, ...], keywords: Mapping[str, Any]) -> Likeness | None:
    """What a call is like; None where more than this settles it."""
    parts: list[Any] = [card.name]
    given: list[np.ndarray] = []
    state = None
    for x in arrays:
        if type(x) is ndarray:
            parts += x.shape, x.strides, x.dtype
            given.append(x)
        elif x is None:
            parts.append(None)
        else:
            return None
    for name, x in keywords.items():
        kind = type(x)
        if kind is ndarray:
            if name == "state":
                state = x
                parts.append(x.flags.writeable)
            elif name in RAGGED:
                return None
            else:
                given.append(x)
            parts += name, x.shape, x.strides, x.dtype
        elif x is None or kind in PLAIN:
            parts += name, kind, x  # True is equal to 1, but not as good
        elif name == "state" and card.again is not None and isinstance(x, tuple) and all(type(S) is ndarray for S in x):
            state = x
            for S in x:
                parts += S.flags.writeable, S.shape, S.strides, S.dtype
        else:
            return None
    own = card.again is None and (card.pack_state is not None or card.from_core is not None)
    layout = keywords.get("layout", "time_first")
    if own or type(layout) is not str or layout != "time_first":
        return None
    return tuple(parts), given, state


def repeat(like: Likeness) -> tuple[Any, Any] | None:
    """(out, final state) of a call like one before; None if there is none, or it must be done in full."""
    key, given, state = like
    call = _known.get(key)
    return None if call is None else call(given, state)


def _each(state: Any) -> tuple[Any, ...]:
    """The arrays of a state."""
    return state if isinstance(state, tuple) else () if state is None else (state,)


def remember(like: Likeness, card: Card, c: Any, inputs: Inputs, plan: Plan, kept: matrix_state.Kept) -> None:
    """Keep a call that went well, if it can be done again for other numbers.

    One array given twice tells nothing of a call with two.
    """
    key, given, state = like
    arrays = [*given, *_each(state)]
    if key not in _known and len({address(y) for y in arrays}) == len(arrays):
        if len(_known) >= MOST:
            _known.clear()
        if card.again is not None:
            _known[key] = card.again(c, inputs, plan, kept, given, state)
        else:
            _known[key] = matrix_state.again(inputs, plan, state, kept, given)
