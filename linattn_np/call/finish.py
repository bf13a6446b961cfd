"""From what a core returns to the public result: out in the caller's dtype and layout, states in the public form."""

from __future__ import annotations

from typing import Any

from ..core import StatesAt
from ..ops.host import write
from ..runtime.arrays import Array, cast, is_mutable, stored_like
from ..runtime.memory import place_of
from ..runtime.recorder import refuse
from .binding import Prepared
from .layouts import LAYOUTS
from .positions import states_at
from .results import Result, StatesResult


def finished(call: Prepared, core_out: Array | None, end: Any) -> Result | StatesResult:
    """The public result; its state is None if it is not asked for."""
    return finish_at(call, core_out, end) if isinstance(end, StatesAt) else Result(*finish(call, core_out, end))


def finish(call: Prepared, core_out: Array | None, end: Array) -> tuple[Any, Any]:
    """The public (out, state) from the core's output and final state; state is None if it is not asked for."""
    spec, xp, options = call.spec, call.plan.xp, call.options
    out = core_out
    if out is not None:
        if spec.change.from_core is not None:
            out = spec.change.from_core(call.variables, out)
        out = stored_like(xp, out, getattr(call.variables, spec.change.value))
        if options["layout"] != "time_first":
            out = LAYOUTS[options["layout"]].leave_rows(xp, out, spec.row_axes)
        out = call.library.give_back(out)
    if out is not None and not (options["return_state"] or options["overwrite_state"]):
        return out, None
    state = spec.state.unpack(call.variables, end) if spec.state.unpack else end
    if isinstance(state, tuple):
        given = (None,) * len(state) if call.given_state is None else call.given_state
        state = type(state)(*(final_state(call, S, own) for S, own in zip(state, given, strict=True)))
    else:
        state = final_state(call, state, call.given_state)
    return out, state if out is None or options["return_state"] else None


def finish_at(call: Prepared, core_out: Array | None, ends: StatesAt) -> StatesResult:
    """The public result with states at positions."""
    states = states_at(call, ends.at)  # first: the initial state may be among them, and be overwritten
    out, state = finish(call, core_out, ends.end)
    return StatesResult(out, state if call.options["return_state"] else None, states)


def final_state(call: Prepared, S: Array, given: Array | None) -> Any:
    """The public final state: in the caller's array with overwrite_state, else in memory of its own."""
    xp = call.plan.xp
    if call.options["overwrite_state"] and given is not None:
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
    if call.variables.sizes.T == 0:
        S = xp.asarray(S, copy=True)
    return call.library.give_back(S)
