"""The recorded plan of a variant whose state is converted to the core's and back: both conversions are traced.

Array calls before the core, the core's own plan, and array calls after it, which share one memory of results.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ...core import COMPUTATIONS
from ...ops.cpu.programs import Ahead, Views, is_whole  # plans are recorded where there are compiled loops
from ...runtime.agreement import other_numbers
from ...runtime.arrays import Array
from ...runtime.memory import shares_memory
from ...runtime.tracing import plain, traced_variables
from ..binding import Prepared
from ..replay import finished


class Parts(NamedTuple):
    """Which parts of the public state the core's state is made of, in its order, and the others."""

    core: list[int]
    others: list[int]
    like: Any  # a state of the core

    @classmethod
    def of(cls, call: Prepared, state: Any) -> Parts:
        """Of a call with this state.   Raises StopIteration for a state that is computed from it."""
        format, parts = call.spec.state, state_parts(state)
        c = type(call.variables)(**vars(call.variables) | {"state": state})
        packed = format.pack(c, state) if format.pack else state
        chosen = [next(n for n, S in enumerate(parts) if is_whole(S, y)) for y in state_parts(packed)]
        return cls(chosen, [n for n in range(len(parts)) if n not in chosen], packed)

    def of_core(self, parts: list[Array]) -> Any:
        """The core's state; None without one."""
        return like_state(self.like, [parts[n] for n in self.core]) if parts else None


def record_state(call: Prepared, names: tuple[str, ...], state: Any, residuals: Any) -> Any:
    """The plan of a variant whose state is not the core's; of the core's state, parts of the public one."""
    own, parts = state_parts(state), Parts.of(call, state)
    if not own or parts.core == [0] == list(range(len(own))):
        plan = _at_once(call, names, state, residuals)
        if plan is not None:
            return plan
    trace, c = traced_variables(call.variables, names, *(own[n] for n in parts.others))
    for n, y in zip(parts.others, trace.arrays[len(names) :], strict=True):
        own[n] = y
    c.state = None if state is None else like_state(state, own)
    x = call.spec.change.to_core(c)
    before, x = Ahead(trace), type(x)(*map(plain, x))
    begin, stored = parts.of_core(state_parts(state)), [S.dtype for S in state_parts(state)]
    core_plan = call.plan._replace(overwrite=call.plan.overwrite and all(d == call.plan.dtype for d in stored))
    plan = COMPUTATIONS[type(x)].record(x, core_plan, begin, residuals, before.following)
    if plan is None:
        return None
    after, final = _after(call, names, state, (plan, before, parts, c))
    overwrite, others, core_parts = call.plan.overwrite, parts.others, parts.core
    is_same, has_out, kind = core_parts == list(range(len(own))), final[0] is not None, final[1]

    def replayed(arrays: list[Array], state: Any, pointers: None = None) -> Any:
        begin = state
        if not is_same and state is not None:
            own = state_parts(state)
            begin, more = parts.of_core(own), [own[n] for n in others]
            if overwrite and shares_memory(more, [*arrays, *state_parts(begin)]):
                return None
            arrays = [*arrays, *more]
        memory = before.run(arrays)
        found = plan([*arrays, memory], begin, None)
        if found is None:
            return None
        results = after.run([*arrays, memory, memory, *([found[0]] if has_out else ()), *state_parts(found[1])])
        out, ends = (results[0], results[1:]) if has_out else (None, results)
        if not overwrite:
            return out, like_state(kind, ends)
        for S, y in zip(state_parts(state), ends, strict=True):
            if S is not y:
                S[...] = y
        return out, state

    return replayed


def _at_once(call: Prepared, names: tuple[str, ...], state: Any, residuals: Any) -> Any:
    """The plan of a state of one array that the core takes as it is, converted behind the core."""
    trace, c = traced_variables(call.variables, names)
    x, change = call.spec.change.to_core(c), call.spec.change

    def then(out: Any, end: Any) -> Any:
        end = call.spec.state.unpack(c, end)  # type: ignore[misc]
        return out if out is None or change.from_core is None else finished(call, c, out), end

    return COMPUTATIONS[type(x)].record(x, call.plan, state, residuals, trace, then)


def _after(call: Prepared, names: tuple[str, ...], state: Any, recorded: Any) -> tuple[Views, tuple[Any, Any]]:
    """(what makes the public results from the arrays of a call and the core's results, results like them).

    recorded: the core's plan, the array calls before it, the parts of its state, traced variables.
    """
    plan, before, parts, c = recorded
    given = [getattr(call.variables, n) for n in names]
    copies = other_numbers([*given, *state_parts(state)]) or []
    own, arrays = copies[len(given) :], [*copies[: len(given)]]
    arrays += [own[n] for n in parts.others]
    out, end = plan([*arrays, before.run(arrays)], parts.of_core(own), None)
    trace = before.trace
    if out is not None:
        out = finished(call, c, trace.added(out)) if call.spec.change.from_core else trace.added(out)
    ends = [trace.added(y) for y in state_parts(end)]
    unpack: Any = call.spec.state.unpack
    final = unpack(c, ends[0] if len(ends) == 1 else tuple(ends))
    found = [*([] if out is None else [out]), *state_parts(final)]
    return before.after(found), (out, final)


def state_parts(state: Any) -> list[Any]:
    """The arrays of a state."""
    return [] if state is None else list(state) if isinstance(state, tuple) else [state]


def like_state(kind: Any, parts: list[Any]) -> Any:
    """A state like `kind` of these arrays."""
    if not isinstance(kind, tuple):
        return parts[0]
    return type(kind)(*parts) if hasattr(kind, "_fields") else tuple(parts)
