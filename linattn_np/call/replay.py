"""Replay: a call with a known signature runs its recorded plan on the new arrays.

Checking and planning a small call takes longer than computing it. A successful call is therefore recorded under its
signature key: everything that its checks and its plan depend on, except the numbers in its arrays. Recorded plans:

    CuPy    the kernel launches, with the positions of pointers among their arguments: forward, and forward and pullback
            of vjp. Only for calls that did nothing else on the device.
    NumPy   the tables of the compiled loops, with the positions of addresses. Only for calls whose variables are the
            core's, or of variants with their own StateFormat.record.

Not recorded: ragged batches, row numbers on the host, arrays of other libraries, one array given twice, a layout that
raises a warning. LINATTN_NP_REPLAY=0 in the environment at import disables replay; `clear()` deletes all plans.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Hashable, Mapping
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np

from ..matrix_state import core as matrix_state
from ..runtime.handles import address
from ..spec import VariantSpec

Array = Any
MOST = 512  # recorded plans at most
PLAIN = frozenset((bool, int, float, str))  # types of options that can be part of a key
ON_HOST = ("cu_seqlens", "state_rows")  # the plan depends on their values

ENABLED = os.environ.get("LINATTN_NP_REPLAY", "1") != "0"

_plans: dict[Hashable, Any] = {}
ndarray, new = np.ndarray, tuple.__new__  # calling the NamedTuple class takes three times as long


class Signature(NamedTuple):
    """The key of a call and its arrays, in the order of positions and keywords; the state is separate.

    pointers: those of all CuPy arrays in order, including the state; None for NumPy.
    """

    key: tuple[Any, ...]
    arrays: list[Array]
    state: Any
    pointers: list[int] | None = None


def find(signature: Signature) -> Any:
    """The plan recorded under a signature, or None."""
    return _plans.get(signature[0])


def known(key: Hashable) -> Any:
    """The plan recorded under a key, or None."""
    return _plans.get(key)


def store(key: Hashable, plan: Any) -> None:
    """Record a plan; it replaces the oldest one if there are MOST."""
    if len(_plans) >= MOST and key not in _plans:
        del _plans[next(iter(_plans))]
    _plans[key] = plan


def store_bound(call: Any, signature: Signature, inputs: Any, residuals: Any) -> None:
    """Record the plan of a call on NumPy arrays, if it can be replayed.

    A call with one array given twice is not recorded: its plan does not apply to two different arrays.
    """
    each = signature.state if isinstance(signature.state, tuple) else (signature.state,)
    arrays = [*signature.arrays, *(S for S in each if S is not None)]
    if not ENABLED or signature.key in _plans or len({address(y) for y in arrays}) < len(arrays):
        return
    spec, given, state = call.spec, signature.arrays, signature.state
    if spec.state.record is not None:
        recorded = spec.state.record(call.variables, inputs, call.plan, residuals, given, state)
    else:
        recorded = matrix_state.record(inputs, call.plan, state, residuals, given)
    store(signature.key, recorded or _in_full)


def _in_full(arrays: list[Array], state: Any, pointers: None) -> None:
    """The plan of calls that are always computed in full."""


def count() -> int:
    """The number of recorded plans."""
    return len(_plans)


def clear() -> None:
    """Delete every recorded plan."""
    _plans.clear()


def signature(spec: VariantSpec, arrays: tuple[Any, ...], keywords: Mapping[str, Any]) -> Signature | None:
    """The signature of a call; None if its plan depends on more than a signature holds."""
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
            other = _signature_of(type(x))
            return None if other is None else other(spec, type(x), arrays, keywords)
    for name, x in keywords.items():
        kind = type(x)
        if kind is ndarray:
            if name == "state":
                state = x
                parts.append(x.flags.writeable)
            elif name in ON_HOST:
                return None
            else:
                given.append(x)
            parts += name, x.shape, x.strides, x.dtype
        elif x is None or kind in PLAIN:
            parts += name, kind, x  # with the type: True == 1, but they are different options
        elif name == "state" and _is_recorded_state(spec, x):
            state = x
            for S in x:
                parts += S.flags.writeable, S.shape, S.strides, S.dtype
        else:
            other = None if given else _signature_of(kind)
            return None if other is None else other(spec, kind, arrays, keywords)
    layout = keywords.get("layout", "time_first")
    if not spec.is_recorded or type(layout) is not str or layout != "time_first":
        return None
    return new(Signature, (tuple(parts), given, state, None))


def _is_recorded_state(spec: VariantSpec, x: Any) -> bool:
    """Whether a state is a tuple of NumPy arrays of a variant with its own `record`."""
    return spec.state.record is not None and isinstance(x, tuple) and all(type(S) is ndarray for S in x)


@functools.cache
def _signature_of(kind: type) -> Any:
    """What makes the signature of a call on arrays of this type; None for what is not replayed."""
    if kind.__name__ != "ndarray" or kind.__module__.split(".")[0] != "cupy":
        return None
    return import_module(f"{__package__}.device_replay").signature
