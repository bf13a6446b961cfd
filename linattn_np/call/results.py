"""From what a core returns to public results, and from cotangents to public gradients: the last step of a call.

out in the caller's dtype and layout, states in the public form; results and gradients can be pickled and copied.
"""

from __future__ import annotations

import functools
from collections import namedtuple
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..core import StatesAt
from ..ops.host import write, zeros_like
from ..runtime import shapes
from ..runtime.arrays import (
    Array,
    Library,
    Namespace,
    as_computed,
    cast,
    dtype_name,
    enter,
    gradient_like,
    is_complex,
    is_cupy,
    is_mutable,
    stored_like,
)
from ..runtime.memory import place_of
from ..runtime.pieces.memory import empty, first_byte
from ..runtime.recorder import Recorder, refuse
from ..runtime.shapes import flatten, unflatten
from ..spec import Call
from .binding import normalise
from .layouts import LAYOUTS
from .positions import states_at

Form = tuple[tuple[int, ...], bool]  # of an array: its shape, and whether it is complex


class Result(NamedTuple):
    """out and the state after the last token; unpacks as a pair."""

    out: Any
    state: Any


class StatesResult(NamedTuple):
    """out, the state after the last token (None unless return_state), and the states at the positions."""

    out: Any
    state: Any
    states: Any


def finished(call: Call, core_out: Array | None, end: Any) -> Result | StatesResult:
    """The public result; its state is None if it is not asked for."""
    return finish_at(call, core_out, end) if isinstance(end, StatesAt) else Result(*finish(call, core_out, end))


def returned(call: Call, found: Result | StatesResult) -> Any:
    """What the public function returns: out alone, unless a state is asked for."""
    alone = isinstance(found, Result) and found.out is not None and not call.options["return_state"]
    return found.out if alone else found


def finish(call: Call, core_out: Array | None, end: Array) -> tuple[Any, Any]:
    """The public (out, state) from the core's output and final state; state is None if it is not asked for."""
    spec, xp, options = call.spec, call.xp, call.options
    out = core_out
    if out is not None:
        if spec.change.from_core is not None:
            out = spec.change.from_core(call, out)
        if not options.get("return_lse"):  # whose channels have two dtypes (lse.py)
            out = stored_like(xp, out, getattr(call, spec.change.value))
        if options["layout"] != "time_first":
            out = LAYOUTS[options["layout"]].leave_rows(xp, out, spec.row_axes)
        out = call.library.give_back(out)
    if out is not None and not (options["return_state"] or options["overwrite_state"]):
        return out, None
    state = spec.state.unpack(call, end) if spec.state.unpack else end
    if isinstance(state, tuple):
        given = (None,) * len(state) if call.given_state is None else call.given_state
        state = type(state)(*(final_state(call, S, own) for S, own in zip(state, given, strict=True)))
    else:
        state = final_state(call, state, call.given_state)
    return out, state if out is None or options["return_state"] else None


def finish_at(call: Call, core_out: Array | None, ends: StatesAt) -> StatesResult:
    """The public result with states at positions."""
    states = states_at(call, ends.at)  # first: the initial state may be among them, and be overwritten
    out, state = finish(call, core_out, ends.end)
    return StatesResult(out, state if call.options["return_state"] else None, states)


def final_state(call: Call, S: Array, given: Array | None) -> Any:
    """The public final state: in the caller's array with overwrite_state, else in memory of its own."""
    xp = call.xp
    if call.options["overwrite_state"] and given is not None:
        if is_complex(S) and not is_complex(given):
            raise TypeError(f"{call.name}: state has dtype {dtype_name(given)}, expected {dtype_name(S)} to be "
                            "overwritten: the recurrence is complex")  # fmt: skip
        S = cast(xp, S, given.dtype)  # the only rounding of a 16-bit state
        if is_mutable(xp):
            if S is not given and call.rows is not None:
                from ..runtime.pools import put_rows

                refuse("NumPy writes rows of the pool")
                put_rows(xp, given, call.rows, S)
            elif S is not given and (place_of(S) is None or place_of(S) != place_of(given)):
                write(xp, given, S)
            S = given
        return call.library.give_back(S)
    if call.sizes["T"] == 0:
        S = xp.asarray(S, copy=True)
    return call.library.give_back(S)


def cotangents(
    call: Call, dout: Any, dstate: Any, out: Form | None, end: Array
) -> tuple[Array | None, Array | None, dict[str, Array]]:
    """(dout in its own dtype, dstate of the core, gradients by name that unpack_state_vjp returns).   out: its form"""
    fn, xp = call.name, call.xp
    if dout is None and dstate is None:
        raise TypeError(f"{fn}: the pullback got neither dout nor dstate, expected at least one")
    dstate = normalise(call.spec, "dstate", dstate, call.options)
    each = flatten("dstate", dstate)
    _, entered = enter(fn, {"dout": dout, **each}, call.library)
    d_out = entered.pop("dout")
    if d_out is not None:
        shape, complex_out = (None, False) if out is None else out
        shapes.check_dtype(fn, "dout", d_out, complex_out)
        if tuple(d_out.shape) != shape:
            raise ValueError(f"{fn}: dout has shape {tuple(d_out.shape)}, expected {shape or 'None: there is no out'}")
        if call.options["layout"] != "time_first":
            d_out = LAYOUTS[call.options["layout"]].enter_rows(xp, d_out, call.spec.row_axes)
    if dstate is None:
        return d_out, None, {}
    spec = call.spec
    with Recorder():  # for its shapes alone: a replayed pullback does not compute it
        want: Any = spec.state.unpack(call, end) if spec.state.unpack else end
    if isinstance(want, tuple) and not isinstance(dstate, tuple):
        names = ", ".join(f"d{n}" for n in flatten("", want)).replace("d.", "d")
        raise TypeError(f"{fn}: dstate is a {type(dstate).__qualname__}, expected ({names}) as a {type(want).__name__}")
    for (name, _), S in zip(each.items(), flatten("dstate", want).values(), strict=True):
        d = entered[name]
        if name.rpartition(".")[2] not in spec.core.STATE_COUNTS:  # which have no gradient
            shapes.check_dtype(fn, name, d, is_complex(S))
        if tuple(d.shape) != tuple(S.shape):
            raise ValueError(f"{fn}: {name} has shape {tuple(d.shape)}, expected {tuple(S.shape)}")
        entered[name] = as_computed(xp, d, call.dtype)
    given = unflatten(dstate, [entered[name] for name in each])
    if spec.state.unpack_vjp is not None:
        return d_out, *spec.state.unpack_vjp(call, end, given)
    return d_out, spec.state.pack(call, given) if spec.state.pack else given, {}


def gradients(call: Call, grads: dict[str, Array], dstate0: Array, beside: Sequence[Any] = ()) -> Any:
    """The gradients as a named tuple by input name; None for inputs that were not given. Takes them from `grads`.

    beside: arrays of the caller, whose memory they do not share.
    """
    spec, xp = call.spec, call.xp
    axes, layout = call.axes, LAYOUTS.get(call.options["layout"])
    values: list[Any] = []
    for name in spec.arrays:
        x = getattr(call, name)
        if x is None:
            values.append(None)
            continue
        d = grads.pop(name, None)  # of a wider dtype: freed once it is rounded
        d = gradient_like(xp, xp.zeros_like(x) if d is None else d, x)
        if layout is not None:
            d = layout.leave(xp, d, axes[name], call.batch)
        values.append(d)
    state, each = None, []
    if call.given_state is not None:
        if spec.state.pack_vjp is not None:
            state = spec.state.pack_vjp(call, dstate0, grads.get("state"))
        else:
            state = spec.state.unpack(call, dstate0) if spec.state.unpack else dstate0
        given, counts = flatten("state", call.given_state), spec.counts
        each = [
            zeros_like(xp, S) if n in counts else gradient_like(xp, d, S)
            for d, (n, S) in zip(flatten("state", state).values(), given.items(), strict=True)
        ]
        if call.sizes["T"] == 0:  # they are the cotangents
            each = [xp.asarray(d, copy=True) for d in each]
    found = [None if d is None else call.library.give_back(d) for d in apart(xp, values + each, beside)]
    state = None if state is None else unflatten(state, found[len(values) :])
    return gradients_of((*spec.arrays, "state"), *found[: len(values)], state)


def apart(xp: Namespace, given: Sequence[Any], others: Sequence[Any] = ()) -> list[Any]:
    """The arrays that a call gives to its caller; copies of those that begin where one before, or one of others, does.

    A sum over one row is a view of it. None entries stay, as do arrays of libraries without addresses.
    """
    places, found = {_begin(y) for y in others if y is not None}, []
    for y in given:
        if y is not None and (at := _begin(y)) is not None:
            if at in places:
                to = xp.empty(tuple(y.shape), dtype=y.dtype) if is_cupy(xp) else empty(y.shape, y.dtype)
                write(xp, to, y)
                y = to
            places.add(at)
        found.append(y)
    return found


def _begin(y: Any) -> int | None:
    """The address of the first element; None without one, and for arrays of other libraries."""
    if not getattr(y, "size", 0):
        return None
    return first_byte(y) if type(y) is np.ndarray else getattr(getattr(y, "data", None), "ptr", None)


def form_of(library: Library, x: Any) -> Form:
    """(shape, whether it is complex) of an array of the caller's library, which may know no more than DLPack."""
    known = x if hasattr(x, "shape") and hasattr(x, "dtype") else enter("form_of", {"x": x}, library)[1]["x"]
    return tuple(known.shape), is_complex(known)


def copied(library: Library, x: Any) -> Any:
    """A copy of an array of the caller's library."""
    if x is None:
        return None
    if type(x) is np.ndarray:
        return np.array(x)
    return library.give_back(library.xp.asarray(enter("copied", {"x": x})[1]["x"], copy=True))


@functools.cache
def gradients_type(names: tuple[str, ...]) -> type:
    """The named tuple with these fields; one class per tuple of names."""
    make: Any = namedtuple  # of fields that are known here only
    kind = make("Gradients", names)
    kind.__reduce__ = lambda self: (gradients_of, (names, *self))
    kind.__doc__ = f"Gradients by input name: {', '.join(names)}; None for what was not given."
    return kind


def gradients_of(names: Iterable[str], *values: Any) -> Any:
    """Gradients with these names and values; pickles call this function."""
    kind: Callable[..., Any] = gradients_type(tuple(names))
    return kind(*values)
