"""Checks of a state that is overwritten: its dtype, and the memory that it shares."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from ..runtime.arrays import NARROW, complex_of, dtype_name, is_mutable
from ..runtime.memory import Place, is_on_device, overlap, overlaps_itself, place_of

EXACT = {"float16": 2**11, "bfloat16": 2**8, "float32": 2**24, "float64": 2**53}  # all whole numbers up to here
NO_COUNTS: Mapping[str, Any] = MappingProxyType({})


def check_overwritten(
    fn: str, state: Mapping[str, Any], plan: Any, theirs: Mapping[str, Any], counts: Mapping[str, Any] = NO_COUNTS
) -> None:
    """Check that the final state can be written into the parts of `state`; theirs: the caller's arrays.

    counts: by name, the whole numbers that the sequences begin with; other rows of a pool may hold anything. Raises
    TypeError for a dtype that is neither the compute dtype nor 16-bit, and for a NumPy scalar; ValueError for a
    read-only array, for elements that share memory, and for a count that its floats would not hold after the call.
    """
    for name, S in theirs.items():
        if isinstance(S, np.generic):
            raise TypeError(
                f"{fn}: {name} is a NumPy scalar, expected an array, also without axes: "
                "overwrite_state=True writes into it"
            )
        if not getattr(getattr(S, "dtype", None), "isnative", True):
            raise TypeError(f"{fn}: {name} is byte-swapped, expected this machine's byte order to be overwritten")
    for name, S in state.items():
        if name in counts:
            _check_count(fn, name, counts[name], plan)
        elif S.dtype != plan.dtype and S.dtype != complex_of(plan.xp, plan.dtype) and dtype_name(S) not in NARROW:
            wanted = dtype_name(plan.xp.empty(0, dtype=plan.dtype))
            raise TypeError(f"{fn}: {name} has dtype {dtype_name(S)}, expected {wanted} to be overwritten")
        if getattr(getattr(S, "flags", None), "writeable", True) is False:
            raise ValueError(f"{fn}: {name} is read-only, expected a writeable array with overwrite_state=True")
    _check_disjoint(fn, {name: place_of(S) for name, S in state.items()})


def _check_count(fn: str, name: str, x: Any, plan: Any) -> None:
    """Check that numbers of tokens can be advanced where they are."""
    kind = dtype_name(x)
    if kind == "int32" and is_mutable(plan.xp):
        raise TypeError(f"{fn}: {name} has dtype int32, expected int64 to be overwritten")
    if kind in EXACT and x.size:
        most = int(x.max()) + max((s.stop - s.start for s in plan.sequences), default=0)
        if most > EXACT[kind]:
            raise ValueError(
                f"{fn}: {name} would be {most}, {kind} has all whole numbers up to {EXACT[kind]} only: "
                "expected int64 to be overwritten"
            )


def _check_disjoint(fn: str, places: dict[str, Place | None]) -> None:
    """Check that no two elements of an overwritten state share memory, if the library exposes addresses."""
    known = {name: place for name, place in places.items() if place is not None}
    for name, place in known.items():
        if overlaps_itself(place):
            raise ValueError(
                f"{fn}: {name} has elements that share memory (shape {place.shape}, strides "
                f"{place.strides} bytes), expected memory of its own for each with overwrite_state=True"
            )
    for (one, a), (other, b) in itertools.combinations(known.items(), 2):
        if overlap(a, b):
            raise ValueError(
                f"{fn}: {one} and {other} share memory, expected memory of its own for each with overwrite_state=True"
            )


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
                raise ValueError(
                    f"{fn}: {name} and {other} share memory, expected a state apart from the inputs with "
                    "overwrite_state=True"
                )
