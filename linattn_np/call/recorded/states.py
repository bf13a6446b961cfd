"""The recorded plan of a variant whose state is converted to the core's and back: both conversions are traced.

Array calls before the core, the core's own plan, and array calls after it, which share one memory of results.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ...core import COMPUTATIONS
from ...ops.cpu.programs import Ahead, Places, Views, is_whole  # plans are recorded where there are compiled loops
from ...runtime.agreement import other_numbers
from ...runtime.arrays import Array
from ...runtime.tracing import Trace, Untraceable, contains, plain, traced_variables
from ..binding import Prepared, normalise
from ..results import traced_output

# (arrays of a call, the memory of results, the core's (out, state)) -> the public (out, state)
After = Callable[[list[Array], np.ndarray, Any], Any]


class Parts(NamedTuple):
    """Which parts of the public state the core's state is made of, in its order, and the others."""

    core: list[int]
    others: list[int]
    kind: type[Any]  # of a state of the core

    @classmethod
    def of(cls, call: Prepared, state: Any) -> Parts:
        """Of a call with this state.   Raises Untraceable for a state that is computed from it."""
        format, parts = call.spec.state, state_parts(state)
        c = type(call.variables)(**vars(call.variables) | {"state": state})
        packed = format.pack(c, state) if format.pack else state
        chosen = [next((n for n, S in enumerate(parts) if is_whole(S, y)), -1) for y in state_parts(packed)]
        if -1 in chosen:
            raise Untraceable("the state of the core is computed from that of the call")
        return cls(chosen, [n for n in range(len(parts)) if n not in chosen], type(packed))

    def of_core(self, parts: list[Array]) -> Any:
        """The core's state; None without one."""
        return state_of(self.kind, [parts[n] for n in self.core]) if parts else None


def record_state(call: Prepared, names: tuple[str, ...], state: Any, residuals: Any) -> Any:
    """The plan of a variant whose state is not the core's; of the core's state, parts of the public one."""
    state = normalise(call.spec, "state", state, call.options)
    own, parts = state_parts(state), Parts.of(call, state)
    if not own or parts.core == [0] == list(range(len(own))):
        with contextlib.suppress(Untraceable):
            if (plan := _at_once(call, names, state, residuals)) is not None:
                return plan
    trace, c = traced_variables(call.variables, names, *(own[n] for n in parts.others))
    for n, y in zip(parts.others, trace.arrays[len(names) :], strict=True):
        own[n] = y
    c.state = None if state is None else state_of(type(state), own)
    x = call.spec.change.to_core(c)
    begin = parts.of_core(state_parts(state))
    ready = None if call.spec.change.from_core else _ready(call, c, trace, begin)
    before, x = Ahead(trace), type(x)(*map(plain, x))
    stored = [S.dtype for S in state_parts(state)]
    core_plan = call.plan._replace(overwrite=call.plan.overwrite and all(d == call.plan.dtype for d in stored))
    plan = COMPUTATIONS[type(x)].record(x, core_plan, begin, residuals, before.following)
    if plan is None:
        return None
    after = ready or _after(call, names, state, (plan, before, parts, c))
    return _replayed(state, call.plan.overwrite, parts, (before, plan, after))


def _replayed(state: Any, overwrite: bool, parts: Parts, steps: tuple[Ahead, Any, After]) -> Any:
    """The plan: array calls, the core's plan, and what makes the public results."""
    (before, plan, after), (core, others, _) = steps, parts
    is_same, none, words = core == list(range(len(core) + len(others))), state is None, before.words()

    def replayed(arrays: list[Array], state: Any, pointers: None = None) -> Any:
        begin, all_parts = state, None if none or is_same else state_parts(state)
        if all_parts is not None:
            begin, arrays = parts.of_core(all_parts), [*arrays, *[all_parts[n] for n in others]]
        memory = np.empty(words)
        found = plan([*arrays, memory], begin, None)
        if found is None:
            return None
        out, end = after(arrays, memory, found)
        if not overwrite:
            return out, end
        for S, y in zip(state_parts(state), state_parts(end), strict=True):
            if S is not y:  # nothing is read any more
                S[...] = y
        return out, state

    return replayed


def _at_once(call: Prepared, names: tuple[str, ...], state: Any, residuals: Any) -> Any:
    """The plan of a state of one array that the core takes as it is, converted behind the core."""
    trace, c = traced_variables(call.variables, names)
    x, change = call.spec.change.to_core(c), call.spec.change

    def then(out: Any, end: Any) -> Any:
        end = call.spec.state.unpack(c, end)  # type: ignore[misc]
        return out if out is None or change.from_core is None else traced_output(call, c, out), end

    return COMPUTATIONS[type(x)].record(x, call.plan, state, residuals, trace, then)


def _ready(call: Prepared, c: Any, trace: Trace, begin: Any) -> After | None:
    """What makes the public results where the public state is the core's, and arrays that need none of its results."""
    if begin is None:
        return None
    ends, count = [trace.added(np.empty_like(y)) for y in state_parts(begin)], len(trace.calls)
    final = call.spec.state.unpack(c, state_of(type(begin), ends))  # type: ignore[misc]
    reads = any(contains(end, y) for end in ends for x in trace.calls[count:] for y in x.arrays)
    trace.beside.clear()
    if reads:
        del trace.calls[count:]
        return None
    chosen = [next((n for n, end in enumerate(ends) if end is y), None) for y in state_parts(final)]
    found = [y for n, y in zip(chosen, state_parts(final), strict=True) if n is None]
    views, kind = Views(None, Places(trace), trace, found), type(final)

    def after(arrays: list[Array], memory: np.ndarray, found: Any) -> Any:
        more, ends = iter(views.run([*arrays, memory])), state_parts(found[1])
        return found[0], state_of(kind, [next(more) if n is None else ends[n] for n in chosen])

    return after


def _after(call: Prepared, names: tuple[str, ...], state: Any, recorded: Any) -> After:
    """What makes the public results from the arrays of a call and the core's results, by array calls.

    recorded: the core's plan, the array calls before it, the parts of its state, traced variables.
    """
    plan, before, parts, c = recorded
    given = [getattr(call.variables, n) for n in names]
    copies = other_numbers([*given, *state_parts(state)]) or []
    own, arrays = copies[len(given) :], [*copies[: len(given)]]
    arrays += [own[n] for n in parts.others]
    if (found := plan([*arrays, np.empty(before.words())], parts.of_core(own), None)) is None:
        raise Untraceable("these numbers are computed in full")
    (out, end), trace = found, before.trace
    has_out = out is not None
    if has_out:
        out = traced_output(call, c, trace.added(out)) if call.spec.change.from_core else trace.added(out)
    ends = [trace.added(y) for y in state_parts(end)]
    unpack: Any = call.spec.state.unpack
    final = unpack(c, ends[0] if len(ends) == 1 else tuple(ends))
    views, kind = before.after([*([out] if has_out else []), *state_parts(final)]), type(final)

    def after(arrays: list[Array], memory: np.ndarray, found: Any) -> Any:
        own = [found[0]] if has_out else []
        results = views.run([*arrays, memory, memory, *own, *state_parts(found[1])])
        return (results[0] if has_out else None), state_of(kind, results[len(own) :])

    return after


def state_parts(state: Any) -> list[Any]:
    """The arrays of a state."""
    return [] if state is None else list(state) if isinstance(state, tuple) else [state]


def state_of(kind: type[Any], parts: list[Any]) -> Any:
    """A state of a type, of these arrays."""
    if not issubclass(kind, tuple):
        return parts[0]
    return kind(*parts) if hasattr(kind, "_fields") else tuple(parts)
