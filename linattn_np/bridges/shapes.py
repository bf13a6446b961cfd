"""Shapes and dtypes of a call's result, from its arrays' shapes and dtypes, for frameworks that trace before a call
runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ..call.binding import prepare, spec_of
from ..call.dispatch import run
from ..call.layouts import LAYOUTS
from ..call.pieces import time_of
from ..call.results import Result, StatesResult
from ..runtime.arrays import STORAGE, dtype_name
from ..runtime.shapes import flatten, is_of_pairs, unflatten
from ..spec import Call, VariantSpec


class Abstract(NamedTuple):
    """An array without its numbers."""

    shape: tuple[int, ...]
    dtype: np.dtype

    def filled(self, value: float = 0.0) -> np.ndarray:
        """A read-only array of this shape that holds one number."""
        return np.broadcast_to(np.asarray(value, self.dtype), self.shape)


def abstract(x: Any) -> Abstract:
    """The shape and the dtype of an array of any library, or of its placeholder."""
    name = dtype_name(x)
    if name == "bfloat16":
        import ml_dtypes

        return Abstract(tuple(x.shape), np.dtype(ml_dtypes.bfloat16))
    return Abstract(tuple(x.shape), np.dtype(name if name in STORAGE else str(x.dtype)))


def each(f: Callable[[Any], Any], x: Any) -> Any:
    """f of an array, or of every array of a named tuple or a dict; None stays None."""
    if x is None:
        return None
    if isinstance(x, Mapping):
        return {name: each(f, y) for name, y in x.items()}
    if isinstance(x, tuple) and not isinstance(x, Abstract):
        return type(x)(*(each(f, y) for y in x))
    return f(x)


def abstract_result(fn: Callable[..., Any], arrays: Mapping[str, Any], state: Any, options: Mapping[str, Any]) -> Any:
    """The result of fn(**arrays, state=state, **options), with an `Abstract` in the place of each array.

    arrays: by name; every array, also of the state, needs a shape and a dtype only. options: those that are neither;
    cu_seqlens are numbers. Nothing is computed but a call without tokens. Raises the errors of the call.
    """
    return result_of(spec_of("abstract_result", fn), arrays, state, options)


def result_of(spec: VariantSpec, arrays: Mapping[str, Any], state: Any, options: Mapping[str, Any]) -> Any:
    """abstract_result of a spec."""
    zeros = each(lambda x: abstract(x).filled(), {**arrays, "state": state})
    overwrite = bool(options.get("overwrite_state"))
    call = prepare(spec, (), {**zeros, **options, "overwrite_state": False})
    result = _without_tokens(call, options)
    out = each(lambda x: _out(call, x), result.out)
    end = _end(call, result.state)
    at = call.options["return_states_at"]
    states = None if at is None else each(lambda S: _states(call, S, len(at)), end)
    if overwrite and state is not None:
        given = iter(flatten("", zeros["state"]).values())
        end = each(lambda S: Abstract(S.shape, next(given).dtype), end)
    if at is not None:
        return StatesResult(out, end if call.options["return_state"] else None, states)
    return Result(out, end) if out is None or call.options["return_state"] else out


def _without_tokens(call: Call, options: Mapping[str, Any]) -> Result:
    """The result of the call on no tokens of one batch row, time first."""
    batch = len(call.batch)

    def no_tokens(name: str) -> Any:
        x, time = getattr(call, name), time_of(call, name)
        if time is None:
            return x
        none = x[(slice(1),) * batch + (slice(0), ...)]
        slots = x.shape[-1] - call.sizes["T"]
        return none[..., :slots] if is_of_pairs(call.spec.arrays[name].axes) else none

    given = {name: no_tokens(name) for name in call.spec.arrays}
    given |= {name: options[name] for name in given if isinstance(options.get(name), str)}
    ragged = call.is_ragged
    own = {"cu_seqlens": [0, 0] if ragged else None, "return_states_at": None, "layout": "time_first",
           "overwrite_state": False, "return_state": True}  # fmt: skip
    lead = (slice(1),) * len(call.lead)
    state = each(lambda S: S[(*lead, ...)], call.given_state)
    rest = {name: value for name, value in options.items() if name not in given}
    return run(call.spec, (), {**given, "state": state, **rest, **own})


def _own(call: Call, S: np.ndarray | Abstract) -> tuple[int, ...]:
    """The axes of one state."""
    return S.shape[len(call.lead) :]


def _end(call: Call, state: Any) -> Any:
    """The final state, from that of the call without tokens."""
    core, found = call.spec.core, []
    for name, S in flatten("state", state).items():
        shape = core.end_shape(call.plan, call.given_state, name.rpartition(".")[2], _own(call, S))
        found.append(Abstract(call.lead + shape, S.dtype))
    return unflatten(state, found)


def _out(call: Call, x: np.ndarray) -> Abstract:
    sizes, layout = call.sizes, LAYOUTS.get(call.options["layout"])
    shape = (*sizes["..."], sizes.get("Tq", sizes["T"]), *x.shape[x.ndim - call.spec.row_axes :])
    return Abstract(shape if layout is None else layout.shape(shape, call.spec.row_axes), x.dtype)


def _states(call: Call, S: Abstract, count: int) -> Abstract:
    """States at positions, in the dtype of the computation."""
    lead = call.lead if not call.is_ragged else ()
    dtype = S.dtype if S.dtype.kind in "ic" else np.dtype(call.dtype)
    return Abstract((*lead, count, *_own(call, S)), dtype)
