"""Recorded plans by the signatures of their calls, and how much memory they hold.

Checking and planning a small call takes longer than computing it. A successful call is therefore recorded under its
signature: everything that its checks and its plan depend on, except the numbers in its arrays.

    runtime/pieces/record.py, runtime/cuda/record.py   the kernels of the whole call, on other addresses
    template.py                                        all other calls: other arrays are bound to the checked call
    vjp.py                                             a forward and its pullbacks

Row numbers of a state pool on the host, and which sequences begin without a state, are part of a key with their
values, on NumPy up to 512; on a device only launches read them. Without a signature: ragged batches, other row numbers
on the host, arrays without a view (foreign.py), an array as an option.
LINATTN_REPLAY=0 in the environment at import disables replay; `clear()` deletes all plans.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Mapping
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np

from ...runtime.arrays import is_cupy
from ...runtime.held import empty_all
from ...runtime.memory import is_next_column
from ...runtime.pieces.memory import first_byte
from ...runtime.recorder import active
from ...spec import VariantSpec
from ..options import PLAIN, is_plain_tuple, types_in

MOST = 512  # recorded plans at most
MOST_BYTES = 64 << 20  # of all plans in host memory, and as many on a device
LEAST = 16 << 10  # bytes of the Python objects of a plan, where it does not say more
NOT_YET = "replayed, whole or in part, if a first call can be recorded"

ENABLED = os.environ.get("LINATTN_REPLAY", "1") != "0"


class Composed(NamedTuple):
    """The vjp of a call that is composed of others, which are replayed: from its signature."""

    vjp: Callable[[Any], Any]


# by key: of a plain call a function (arrays, state, pointers) -> the public result, or None if it must be computed in
# full; of a vjp Template, Composed or Forward
by_key: dict[Hashable, Any] = {}
reasons: dict[Hashable, str] = {}  # why a plan does not compute the whole call
held: tuple[dict[Hashable, int], dict[Hashable, int]] = {}, {}  # bytes of each plan in host memory, and on a device


def store(key: Hashable, plan: Any, reason: str = "") -> None:
    """Record a plan, in place of the oldest ones if all would exceed MOST or MOST_BYTES.

    reason: why it does not compute the whole call.

    A plan, or the object that it is a method of, says how many bytes it holds beside LEAST: `nbytes` in host memory,
    `device_nbytes` on a device. A plan that has grown is stored again.
    """
    if not ENABLED:
        return
    by_key[key], (host, device) = plan, held
    if reason:
        reasons[key] = reason
    host[key], device[key] = size_of(plan)
    while len(host) > MOST or max(sum(host.values()), sum(device.values())) > MOST_BYTES:
        oldest, *_ = host  # in one step: other threads may record
        for each in (by_key, host, device, reasons):
            each.pop(oldest, None)


def size_of(plan: Any) -> tuple[int, int]:
    """Bytes of a plan in host memory and on a device."""
    owner = getattr(plan, "__self__", plan)
    return LEAST + getattr(owner, "nbytes", 0), getattr(owner, "device_nbytes", 0)


def count() -> int:
    """The number of recorded plans."""
    return len(by_key)


def clear() -> None:
    """Delete every recorded plan."""
    for each in (by_key, *held, reasons):
        each.clear()


def clear_cache() -> None:
    """Free what calls keep in memory for later ones, in this process.

    Recorded plans, on the host and on devices; tables of feature maps and sizes; scratch memory of the calling thread
    and of helper threads that wait for work. The next calls are first calls again. Compiled code stays, in memory and
    on disk.
    """
    clear()
    empty_all()


def described(key: Hashable, in_part: str) -> str:
    """How calls with this key are repeated; in_part: what is said of a plan that has a reason not to be whole."""
    plan, reason = by_key.get(key), reasons.get(key)
    if plan is None:
        return NOT_YET
    if plan is computed_in_full:
        return "what it computes cannot be recorded"
    return f"{in_part} ({reason})" if reason else "replayed"


def computed_in_full(arrays: list[Any], state: Any, pointers: None) -> None:
    """The plan of calls that are always computed in full."""


# signatures

Array = Any
ROWS = ("state_rows", "fresh")
WRITTEN = ("state", "out")  # arrays that a call may write to
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
    """The signature of a call; None if its plan depends on more than a signature holds, and inside of a recording."""
    if active.recorder is not None:
        return None
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
            if name in WRITTEN:
                parts.append(x.flags.writeable)
            if name == "state":
                state = x
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
            parts += name, kind, types_in(x), x
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
    return ENABLED and signature[0] not in by_key and has_distinct_arrays(signature)


def has_distinct_arrays(signature: Signature) -> bool:
    """Whether no two arrays begin at one address: a plan would take two different arrays for one."""
    places = signature[3] or [first_byte(y) for y in signature[1]]
    return len(set(places)) == len(places)


def launches_of(xp: Any) -> Any:
    """The module of the recorded kernels of NumPy or of CuPy arrays."""
    name = "cuda" if is_cupy(xp) else "pieces"
    return import_module(f"{__package__.split('.')[0]}.runtime.{name}.record")
