"""Checks of a state that is overwritten: its dtype, and the memory that it shares."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from ..runtime.arrays import NARROW, dtype_name
from ..runtime.memory import Place, is_on_device, overlap, overlaps_itself, place_of


def check_overwritten(fn: str, state: Mapping[str, Any], plan: Any, theirs: Mapping[str, Any]) -> None:
    """Check that the final state can be written into the parts of `state`; theirs: the caller's arrays.

    Raises TypeError for a dtype that is neither the compute dtype nor 16-bit, ValueError for a read-only array and for
    elements that share memory.
    """
    for name, S in theirs.items():
        if not getattr(getattr(S, "dtype", None), "isnative", True):
            raise TypeError(f"{fn}: {name} is byte-swapped, expected this machine's byte order to be overwritten")
    for name, S in state.items():
        if S.dtype != plan.dtype and dtype_name(S) not in NARROW:
            wanted = dtype_name(plan.xp.empty(0, dtype=plan.dtype))
            raise TypeError(f"{fn}: {name} has dtype {dtype_name(S)}, expected {wanted} to be overwritten")
        if getattr(getattr(S, "flags", None), "writeable", True) is False:
            raise ValueError(f"{fn}: {name} is read-only, expected a writeable array with overwrite_state=True")
    _check_disjoint(fn, {name: place_of(S) for name, S in state.items()})


def _check_disjoint(fn: str, places: dict[str, Place | None]) -> None:
    """Check that no two elements of an overwritten state share memory, if the library exposes addresses."""
    known = {name: place for name, place in places.items() if place is not None}
    for name, place in known.items():
        if overlaps_itself(place):
            raise ValueError(f"{fn}: {name} has elements that share memory (shape {place.shape}, strides "
                             f"{place.strides} bytes), expected memory of its own for each with overwrite_state=True")
    for (one, a), (other, b) in itertools.combinations(known.items(), 2):
        if overlap(a, b):
            raise ValueError(f"{fn}: {one} and {other} share memory, expected memory of its own for each with "
                             "overwrite_state=True")


def overlaps(state: Any, arrays: list[Any]) -> bool:
    """Whether a state on a device shares memory with an input."""
    parts = state if isinstance(state, tuple) else (state,)
    return any(overlap(place_of(S), place_of(x)) for S in parts for x in arrays)


def check_inputs_disjoint(fn: str, state: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
    """On CUDA a state may not overlap an input: a kernel writes it while others still read (NumPy's may overlap)."""
    for name, S in state.items():
        if not is_on_device(S):
            continue
        for other, x in arrays.items():
            if x is not None and overlap(place_of(S), place_of(x)):
                raise ValueError(f"{fn}: {name} and {other} share memory, expected a state apart from the inputs with "
                                 "overwrite_state=True")
