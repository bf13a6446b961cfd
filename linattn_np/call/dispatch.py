"""A public call: replay a recorded plan if its signature is known, else bind, compute, finish and record."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any, TypeVar

import numpy as np

from ..core import COMPUTATIONS, Computation, StatesAt
from ..runtime import threads
from ..runtime.agreement import agrees
from ..runtime.arrays import Array, cast, is_mutable
from ..runtime.held import held_bytes
from ..runtime.tracing import Trace, Untraceable
from ..spec import Samples, VariantSpec
from . import pieces, replay
from .binding import Prepared, prepare, threads_of
from .foreign import bridge_of, symbolic_bridge
from .layouts import LAYOUTS
from .options import COMMON
from .overwrite import overlaps
from .positions import states_at
from .results import Result, StatesResult

NO_LIMIT = contextlib.nullcontext()
F = TypeVar("F", bound=Callable[..., Any])
ndarray = np.ndarray
new = tuple.__new__  # calling a NamedTuple class takes three times as long


def public(spec: VariantSpec, samples: Samples | None = None) -> Callable[[F], F]:
    """Decorator: turn a documented stub into the public function of `spec`; samples: for tests."""

    def decorate(stub: F) -> F:
        @functools.wraps(stub)
        def function(*arrays: Any, **keywords: Any) -> Any:
            return run(spec, arrays, keywords)

        function.spec = spec  # type: ignore[attr-defined]
        function.samples = samples or Samples()  # type: ignore[attr-defined]
        function.__signature__ = _signature(spec)  # type: ignore[attr-defined]
        return function  # type: ignore[return-value]

    return decorate


def _signature(spec: VariantSpec) -> inspect.Signature:
    one, keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    parameters = [
        inspect.Parameter(name, one, default=None if arg.optional else inspect.Parameter.empty)
        for name, arg in spec.arrays.items()
    ]
    options = {**spec.options.defaults, **COMMON}
    return inspect.Signature(parameters + [inspect.Parameter(n, keyword, default=v) for n, v in options.items()])


def core_of(inputs: Any) -> Computation:
    """The core, or its read-out, that computes a call with these inputs."""
    return COMPUTATIONS[type(inputs)]


def run(spec: VariantSpec, arrays: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
    """The result of the public function: out, or (out, state)."""
    first = type(arrays[0] if arrays else next(iter(keywords.values()), None))
    found, signature = NotImplemented, None
    if first is not ndarray:
        found = _of_bridge(bridge_of(arrays, keywords), spec, arrays, keywords)
    if found is NotImplemented and (signature := replay.signature(spec, arrays, keywords)) is None:
        found = _of_bridge(symbolic_bridge(arrays, keywords), spec, arrays, keywords)
    elif found is NotImplemented:
        found = _replayed(signature, spec, keywords)
    if found is not NotImplemented:
        return found
    if keywords.get("reverse") is True:
        from . import reverse

        return reverse.run(run, spec, arrays, keywords, signature)
    with limit(spec, keywords):
        return _computed(prepare(spec, arrays, keywords), signature, arrays, keywords)


def _of_bridge(bridge: Any, spec: VariantSpec, arrays: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
    """The result of a call on another library's arrays; NotImplemented without a bridge, or if it declines."""
    return NotImplemented if bridge is None else bridge.run(spec, arrays, keywords)


def _replayed(signature: replay.Signature, spec: VariantSpec, keywords: Mapping[str, Any]) -> Any:
    """The result of a call by its recorded plan; NotImplemented without one, or if the call must be checked again."""
    key, given, state, pointers = signature
    recorded = replay.plans.get(key)
    if recorded is None:
        return NotImplemented
    plan, returns_state, is_limited, _ = recorded
    if is_limited:
        with limit(spec, keywords):
            found = plan(given, state, pointers)
    else:
        found = plan(given, state, pointers)
    if found is None:
        return NotImplemented
    return new(Result, found) if returns_state else found[0]


def _computed(
    call: Prepared, signature: replay.Signature | None, arrays: tuple[Any, ...], keywords: Mapping[str, Any]
) -> Any:
    """The result of a checked call, whose plan is recorded: change the variables, compute, finish."""
    if call.is_cut:
        return pieces.forward(call, keywords, _run_piece, _final)
    with call.recorder or NO_LIMIT:
        x = call.inputs()
        core = core_of(x)
        lacks = call.lacks_states(core, x)
        if not lacks:
            out, end, residuals = core.forward(call.spec.name, x, call.plan, call.state, call.options["backend"])
            if isinstance(end, StatesAt):
                return _with_states(call, signature, arrays, keywords, (x, out, end, residuals))
            out, state = finish(call, out, end)
    if lacks:
        return pieces.forward(call, keywords, _run_piece, _final)
    if signature is not None and call.is_recordable:
        with contextlib.suppress(MemoryError):  # the call has been computed
            _record(call, signature, arrays, keywords, (x, out, end, state, residuals))
    return Result(out, state) if out is None or call.options["return_state"] else out


def _run_piece(spec: VariantSpec, keywords: dict[str, Any]) -> Any:
    """A piece of a call, without a pullback."""
    return run(spec, (), keywords), None


def limit(spec: VariantSpec, keywords: Mapping[str, Any]) -> contextlib.AbstractContextManager[None]:
    """A context with the option num_threads applied."""
    count = keywords.get("num_threads")
    return NO_LIMIT if count is None else threads.limited(threads_of(spec.name, count))


def finish(call: Prepared, core_out: Array | None, end: Array) -> tuple[Any, Any]:
    """The public (out, state) from the core's output and final state; state is None if it is not asked for."""
    spec, xp, options = call.spec, call.plan.xp, call.options
    out = core_out
    if out is not None:
        if spec.change.from_core is not None:
            out = spec.change.from_core(call.variables, out)
        out = cast(xp, out, getattr(call.variables, spec.change.value).dtype)
        if options["layout"] != "time_first":
            out = LAYOUTS[options["layout"]].leave_rows(xp, out)
        out = call.library.give_back(out)
    if out is not None and not (options["return_state"] or options["overwrite_state"]):
        return out, None
    state = spec.state.unpack(call.variables, end) if spec.state.unpack else end
    if isinstance(state, tuple):
        given = (None,) * len(state) if call.given_state is None else call.given_state
        state = type(state)(*(_final(call, S, own) for S, own in zip(state, given, strict=True)))
    else:
        state = _final(call, state, call.given_state)
    return out, state if out is None or options["return_state"] else None


def finish_at(call: Prepared, core_out: Array | None, ends: StatesAt) -> StatesResult:
    """The public result with states at positions."""
    states = states_at(call, ends.at)  # first: the initial state may be among them, and be overwritten
    out, state = finish(call, core_out, ends.end)
    return StatesResult(out, state if call.options["return_state"] else None, states)


def _final(call: Prepared, S: Array, given: Array | None) -> Any:
    """The public final state: in the caller's array with overwrite_state, else in memory of its own."""
    xp = call.plan.xp
    if call.options["overwrite_state"] and given is not None:
        S = cast(xp, S, given.dtype)  # the only rounding of a 16-bit state
        if is_mutable(xp):
            if S is not given and call.rows is not None:
                from ..runtime.pools import put_rows

                put_rows(xp, given, call.rows, S)
            elif S is not given:
                given[...] = S
            S = given
        return call.library.give_back(S)
    if call.variables.sizes.T == 0:
        S = xp.asarray(S, copy=True)
    return call.library.give_back(S)


def _record(
    call: Prepared, signature: replay.Signature, arrays: tuple[Any, ...], keywords: Mapping[str, Any], computed: Any
) -> None:
    """Record the plan of a call, if it can be replayed.

    computed: the core's inputs, the public output, the core's and the public final state, the core's residuals.
    """
    x, out, end, state, residuals = computed
    plan, reason = None, ""
    if call.recorder is not None and replay.ENABLED:
        from . import device_replay

        own_state = end is call.given_state
        if call.options["overwrite_state"] == own_state:
            given = device_replay.given_arrays(arrays, keywords)
            plan = device_replay.plan_of(given, signature[2], call.recorder, (out, state), own_state)
    if plan is None and replay.is_storable(signature):
        names = replay.names_of(call.spec, signature, arrays, keywords)
        if names is not None:
            in_part: Any = MethodType(bound, replay.Template(signature[0], call, names, core_of(x), residuals))
            if call.recorder is None:
                plan, reason = _whole_plan(call, signature, names, residuals, in_part)
            if plan is None and not (call.options["overwrite_state"] and isinstance(state, tuple)):
                plan = in_part
        plan = plan or replay.computed_in_full
    if plan is not None:
        returns_state = out is None or call.options["return_state"]
        is_limited = call.options["num_threads"] is not None
        replay.store(signature[0], replay.Recorded(plan, returns_state, is_limited, reason))


def _whole_plan(
    call: Prepared, signature: replay.Signature, names: Any, residuals: Any, in_part: Any
) -> tuple[Any, str]:
    """(the plan of everything that a call on NumPy arrays computes, ""), or (None, why there is none)."""
    listed = Trace.listed
    try:
        plan = replay.compiled_plan(call, signature, names, residuals)
    except Untraceable as reason:
        return None, str(reason)
    if Trace.listed == listed or agrees(plan, in_part, *signature[1:3]):
        plan.nbytes = replay.LEAST + held_bytes(plan)
        return plan, ""
    return None, "the recorded array calls do not compute the same for other numbers"


def is_in_part(recorded: replay.Recorded) -> bool:
    """Whether a recorded plan computes the change of variables as a first call does."""
    return type(recorded.plan) is MethodType and recorded.plan.__func__ is bound


def _with_states(
    call: Prepared,
    signature: replay.Signature | None,
    arrays: tuple[Any, ...],
    keywords: Mapping[str, Any],
    computed: Any,
) -> StatesResult:
    """The public result with states at positions; on NumPy arrays the checked call is recorded.

    computed: the core's inputs, output, StatesAt and residuals.
    """
    x, out, ends, residuals = computed
    result = finish_at(call, out, ends)
    if signature is None or not call.is_recordable or not replay.is_storable(signature):
        return result
    if call.options["overwrite_state"]:
        return result
    plan: Any = None
    if call.recorder is not None:
        from . import device_replay

        given = device_replay.given_arrays(arrays, keywords)
        plan = device_replay.plan_of_states(given, call.recorder, result)
    elif (names := replay.names_of(call.spec, signature, arrays, keywords)) is not None:
        plan = MethodType(bound_at, replay.Template(signature[0], call, names, core_of(x), residuals))
    if plan is not None:
        replay.store(signature[0], replay.Recorded(plan, False, call.options["num_threads"] is not None))
    return result


def bound_at(template: replay.Template, arrays: list[Array], state: Any, pointers: None) -> tuple[StatesResult, None]:
    """The plan of a call with states at positions: its result is what the plans of others return as out."""
    call = template.bind(arrays, state)
    out, ends, _ = template.forward(call)
    return finish_at(call, out, ends), None


def bound(template: replay.Template, arrays: list[Array], state: Any, pointers: Any) -> tuple[Any, Any] | None:
    """The plan of a call that is not recorded as a whole: computed without checks, its loops or launches replayed."""
    on_device = pointers is not None
    if on_device:
        own = state if isinstance(state, tuple) else (state,)
        arrays = [x for x in arrays if not any(x is S for S in own)]
    call = template.bind(arrays, state)
    if on_device and call.options["overwrite_state"] and overlaps(state, arrays):
        return None  # an error, which the checks raise
    out, end, _ = template.forward(call)
    return finish(call, out, end)
