"""Signatures: what a recorded plan depends on.

Row numbers of a state pool on the host, and which sequences begin without a state, are part of a key with their
values, on NumPy up to 512; on a device only launches read them. Without a signature: ragged batches, other row numbers
on the host, arrays without a view (foreign.py), an array as an option.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np

from ...runtime.memory import is_next_column
from ...runtime.pieces.memory import first_byte
from ...spec import VariantSpec
from ..options import PLAIN, is_plain_tuple
from . import plans

Array = Any
ROWS = ("state_rows", "fresh")
ON_HOST = ("cu_seqlens", *ROWS)  # the plan depends on their values
MOST_ROWS = 512  # rows of a pool, on the host, that are part of a key with their values

# (key, arrays in order, state, pointers of the arrays: None on NumPy). A plain tuple: replay begins with making one.
Signature = tuple[tuple[Any, ...], Any, Any, "list[int] | None"]

makers: dict[Any, Any] = {}  # by type of array: the function that makes a signature; None for what is not replayed
ndarray = np.ndarray


def vjp_key(signature: Signature) -> Hashable:
    """The key of a vjp."""
    return "vjp", signature[0]


def signature_of(spec: VariantSpec, arrays: tuple[Any, ...], keywords: Mapping[str, Any]) -> Signature | None:
    """The signature of a call; None if its plan depends on more than a signature holds."""
    first = type(arrays[0] if arrays else next(iter(keywords.values()), None))
    if first is not ndarray and (other := makers.get(first)) is not None:
        return other(spec, arrays, keywords)
    parts: list[Any] = [spec.name]
    given: list[np.ndarray] = []
    state = None
    for x in arrays:
        if type(x) is ndarray:
            parts += x.shape, x.strides, x.dtype
            given.append(x)
        elif x is None:
            parts.append(None)
        else:
            return None if (other := signature_maker(type(x))) is None else other(spec, arrays, keywords)
    for name, x in keywords.items():
        kind = type(x)
        if kind is ndarray:
            parts += name, x.shape, x.strides, x.dtype
            if name in ROWS and x.size <= MOST_ROWS:
                parts.append(x.tobytes())
            elif name in ON_HOST:
                return None
            else:
                given.append(x)
            if name == "state":
                state = x
                parts.append(x.flags.writeable)
        elif x is None or kind in PLAIN:
            parts += name, kind, x  # with the type: True == 1, but they are different options
        elif name == "state" and isinstance(x, tuple):
            state = x
            parts += name, len(x)
            for S in x:
                if type(S) is not ndarray:
                    return None
                parts += S.flags.writeable, S.shape, S.strides, S.dtype
                given.append(S)
            parts.append(len(x) > 1 and is_next_column(*x[:2]))
        elif name in ROWS and kind in (list, tuple) and len(x) <= MOST_ROWS and set(map(type, x)) <= {int, bool}:
            parts += name, kind, tuple(map(type, x)), tuple(x)
        elif is_plain_tuple(x := tuple(x) if kind is list else x) and name not in ON_HOST:
            parts += name, kind, tuple(map(type, x)), x
        else:
            other = None if given else signature_maker(kind)
            return None if other is None else other(spec, arrays, keywords)
    return tuple(parts), given, state, None


def signature_maker(kind: Any) -> Any:
    """The function that makes the signature of a call on arrays of this type; None for what is not replayed."""
    if kind not in makers:
        makers[kind] = None
        if kind.__name__ == "ndarray" and kind.__module__.split(".")[0] == "cupy":
            from . import device

            makers[kind] = device.signature_maker(kind)
    return makers[kind]


def names_of(
    spec: VariantSpec, signature: Signature, arrays: tuple[Any, ...], keywords: Mapping[str, Any]
) -> tuple[str, ...] | None:
    """The names of the arrays of a signature, in its order without the state; None if others cannot be bound to them.

    That is the case if an option is an array, such as row numbers on a device, and for swapped bytes, which are
    converted first.
    """
    kind, in_key = type(next(iter(signature[1]), None)), ROWS if signature[3] is None else ()
    found = [name for name, x in zip(spec.arrays, arrays, strict=False) if type(x) is kind]
    found += [name for name, x in keywords.items() if type(x) is kind and name not in ("state", *in_key)]
    bindable = spec.arrays.keys() >= set(found) and all(y.dtype.isnative for y in signature[1])
    return tuple(found) if bindable else None


def split(signature: Signature) -> tuple[list[Array], Any]:
    """(the arrays without the state, the state)."""
    _, arrays, state, _ = signature
    return without(arrays, state), state


def without(arrays: list[Array], state: Any) -> list[Array]:
    """The arrays of a signature without the state."""
    own = state if isinstance(state, tuple) else (state,)
    return [x for x in arrays if not any(x is S for S in own)]


def is_storable(signature: Signature) -> bool:
    """Whether the plan of a plain call may be recorded: not if there is one, and not for one array given twice."""
    return plans.ENABLED and signature[0] not in plans.by_key and has_distinct_arrays(signature)


def has_distinct_arrays(signature: Signature) -> bool:
    """Whether no two arrays begin at one address: a plan would take two different arrays for one."""
    places = signature[3] or [first_byte(y) for y in signature[1]]
    return len(set(places)) == len(places)
