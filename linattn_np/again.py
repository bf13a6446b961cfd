"""A call like one before it: what shapes, strides, dtypes and options settle is settled once.

A step of decoding takes less time than checking its arguments. So a call that went well is remembered under all that
its checks depend on; the next one alike goes straight to the kernel. Only calls of which everything but the numbers in
the arrays is known are looked up here: NumPy arrays, a state, a compiled backend asked for, no ragged batch, and a
variant whose variables are the core's.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np

from .card import Card
from .cores import matrix_state
from .cores.matrix_state.inputs import Inputs, Plan

MOST = 256  # calls that are remembered
_known: dict[Hashable, Any] = {}


def likeness(card: Card, arrays: tuple[Any, ...], keywords: Mapping[str, Any]) -> Hashable | None:
    """All that settles a call, but for the numbers in its arrays; None where more than this does."""
    if keywords.get("backend") != "numba" or type(keywords.get("state")) is not np.ndarray:
        return None
    if card.pack_state or card.from_core or keywords.get("layout", "time_first") != "time_first":
        return None
    parts: list[Hashable] = [card.name, keywords["state"].flags.writeable]
    for x in arrays:
        if type(x) is np.ndarray:
            parts += (x.shape, x.strides, x.dtype)
        elif x is None:
            parts.append(None)
        else:
            return None
    for name, x in keywords.items():
        if type(x) is np.ndarray:
            if name == "cu_seqlens":
                return None
            parts += (name, x.shape, x.strides, x.dtype)
        elif x is None or type(x) in (bool, int, float, str):  # True is equal to 1, but not as good
            parts += (name, type(x), x)
        else:
            return None
    return tuple(parts)


def remember(
    key: Hashable, arrays: tuple[Any, ...], keywords: Mapping[str, Any], inputs: Inputs, plan: Plan
) -> None:
    """Keep a call that went well, if it can be done again for other numbers."""
    if key in _known:
        return
    if len(_known) >= MOST:
        _known.clear()
    given = _given(arrays, keywords)
    _known[key] = matrix_state.again(inputs, plan, keywords["state"], keywords["backend"], given)


def repeat(key: Hashable, arrays: tuple[Any, ...], keywords: Mapping[str, Any]) -> tuple[Any, Any] | None:
    """(out, final state) of a call like one before; None if there is none, or it must be done in full."""
    call = _known.get(key)
    return None if call is None else call(_given(arrays, keywords), keywords["state"])


def _given(arrays: tuple[Any, ...], keywords: Mapping[str, Any]) -> list[np.ndarray]:
    """The arrays of a call but for its state."""
    given = [x for x in arrays if x is not None]
    return given + [x for name, x in keywords.items() if type(x) is np.ndarray and name != "state"]
