"""States as their parts: one array in most variants, a named tuple of arrays in some."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from ..matrix_state.types import Plan
from ..runtime.arrays import NARROW, dtype_name
from ..runtime.memory import Place, is_on_device, overlap, overlaps_itself, place_of
from ..spec import VariantSpec


def normalise(spec: VariantSpec, name: str, state: Any, options: dict[str, Any]) -> Any:
    """A state in the variant's form: one array, or its named tuple from any tuple of that length."""
    kind = spec.state.type_of(options)
    if not isinstance(state, tuple):
        return state
    if kind is None:
        raise TypeError(f"{spec.name}: {name} is a {type(state).__qualname__}, expected one array (..., H, K, V)")
    if len(state) != len(kind._fields) or any(S is None for S in state):
        count = {2: "two", 3: "three"}[len(kind._fields)]
        raise TypeError(f"{spec.name}: {name} is a {type(state).__qualname__} of {len(state)}, "
                        f"expected {count} arrays ({', '.join(kind._fields)}) as a {kind.__name__}")
    return kind(*state)


def by_name(spec: VariantSpec, arrays: tuple[Any, ...], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """The caller's arrays and state by name."""
    given = dict(zip(spec.arrays, arrays, strict=False))
    given |= {n: x for n, x in keywords.items() if n in spec.arrays}
    options = {**spec.options.defaults, **keywords}
    return given | flatten("state", normalise(spec, "state", options.get("state"), options))


def flatten(name: str, state: Any) -> dict[str, Any]:
    """The arrays of a state by name: "state", or "state.S", "state.z", ..."""
    if not isinstance(state, tuple):
        return {name: state}
    fields: Any = state  # a named tuple
    return {f"{name}.{n}": S for n, S in fields._asdict().items()}


def unflatten(like: Any, each: list[Any]) -> Any:
    """The inverse of flatten."""
    return type(like)(*each) if isinstance(like, tuple) else each[0]


def stored(state: Any) -> dict[str, str]:
    """The arrays of a state that are stored in 16 bits, with their dtypes."""
    each = {name: dtype_name(S) for name, S in flatten("state", state).items() if S is not None}
    return {name: kind for name, kind in each.items() if kind in NARROW}


def check_overwritten(fn: str, state: Any, plan: Plan, own: Any) -> None:
    """Check that the final state can be written into `state`; own: the caller's arrays.

    Raises TypeError for a dtype that is neither the compute dtype nor 16-bit, ValueError for a read-only array and for
    elements that share memory.
    """
    for name, S in flatten("state", own).items():
        if not getattr(getattr(S, "dtype", None), "isnative", True):
            raise TypeError(f"{fn}: {name} is byte-swapped, expected this machine's byte order to be overwritten")
    for name, S in flatten("state", state).items():
        if S.dtype != plan.dtype and dtype_name(S) not in NARROW:
            wanted = dtype_name(plan.xp.empty(0, dtype=plan.dtype))
            raise TypeError(f"{fn}: {name} has dtype {dtype_name(S)}, expected {wanted} to be overwritten")
        if getattr(getattr(S, "flags", None), "writeable", True) is False:
            raise ValueError(f"{fn}: {name} is read-only, expected a writeable array with overwrite_state=True")
    _check_apart(fn, {name: place_of(S) for name, S in flatten("state", state).items()})


def _check_apart(fn: str, places: dict[str, Place | None]) -> None:
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


def check_inputs_apart(fn: str, state: Any, given: dict[str, Any]) -> None:
    """On CUDA a state may not overlap an input: a kernel writes it while others still read (NumPy's may overlap)."""
    for name, S in flatten("state", state).items():
        if not is_on_device(S):
            continue
        for other, x in given.items():
            if x is not None and overlap(place_of(S), place_of(x)):
                raise ValueError(f"{fn}: {name} and {other} share memory, expected a state apart from the inputs with "
                                 "overwrite_state=True")
