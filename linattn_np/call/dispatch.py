"""A public call: replay a recorded plan if its signature is known, else bind, compute, finish and record."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np

from ..core import Computation
from ..runtime import threads
from ..spec import Call, Samples, VariantSpec
from . import head_parts, parts, pieces
from .binding import inputs_of, is_cut, is_recordable, lacks_states, prepare, threads_of
from .foreign import bridge_of, symbolic_bridge
from .options import COMMON
from .replay import plans
from .replay.plans import Signature, is_storable, launches_of, names_of, signature_of
from .replay.template import Template
from .results import final_state, finished, returned

NO_LIMIT = contextlib.nullcontext()
F = TypeVar("F", bound=Callable[..., Any])
ndarray = np.ndarray
new = tuple.__new__  # calling a NamedTuple class takes three times as long


def public(spec: VariantSpec, samples: Samples | None = None) -> Callable[[F], F]:
    """Decorator: turn a documented stub into the public function of `spec`; samples: for tests."""

    def decorate(stub: F) -> F:
        call = result_of if "return_lse" in spec.options else run

        @functools.wraps(stub)
        def function(*arrays: Any, **keywords: Any) -> Any:
            return call(spec, arrays, keywords)

        function.spec = spec  # type: ignore[attr-defined]
        vars(spec)["function"] = function  # by whose name it is pickled
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
    options = {**spec.options, **COMMON}
    return inspect.Signature(parameters + [inspect.Parameter(n, keyword, default=v) for n, v in options.items()])


def result_of(spec: VariantSpec, arrays: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
    """The result of the public function where `run` computes two outputs as one array."""
    found = run(spec, arrays, keywords)
    if keywords.get("return_lse") is not True:
        return found
    from . import lse

    return lse.split(found, value_of(spec, arrays, keywords))


def value_of(spec: VariantSpec, arrays: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
    """The array of the values, whose dtype outputs have."""
    return (dict(zip(spec.arrays, arrays, strict=False)) | dict(keywords))[spec.change.value]


def core_of(inputs: Any) -> Computation:
    """The core, or its read-out, that computes a call with these inputs."""
    return inputs.computation


def run(spec: VariantSpec, arrays: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
    """The result of the public function: out, or (out, state)."""
    first, found, signature = type(arrays[0] if arrays else next(iter(keywords.values()), None)), NotImplemented, None
    if first is not ndarray:
        found = _of_bridge(bridge_of(arrays, keywords), spec, arrays, keywords)
    if found is NotImplemented and (signature := signature_of(spec, arrays, keywords)) is None:
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


def _replayed(signature: Signature, spec: VariantSpec, keywords: Mapping[str, Any]) -> Any:
    """The result of a call by its recorded plan; NotImplemented without one, or if the call must be checked again."""
    key, given, state, pointers = signature
    if (plan := plans.by_key.get(key)) is None:
        return NotImplemented
    if "num_threads" in keywords:
        with limit(spec, keywords):
            found = plan(given, state, pointers)
    else:
        found = plan(given, state, pointers)
    return NotImplemented if found is None else found


def _computed(call: Call, signature: Signature | None, arrays: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
    """The result of a checked call, whose plan is recorded: change the variables, compute, finish."""
    if is_cut(call):
        return pieces.forward(call, keywords, _run_piece, final_state)
    if call.spec.change.by_tokens and len(each := parts.parts_of(call)) > 1:
        return parts.forward(call, each)
    if call.spec.change.by_heads and len(each := head_parts.parts_of(call)) > 1:
        return head_parts.forward(call, each)
    with call.recorder or NO_LIMIT:
        x = inputs_of(call)
        core = core_of(x)
        if lacks_states(call, core, x):
            return pieces.forward(call, keywords, _run_piece, final_state)
        out, end, _ = core.forward(call.name, x, call.plan, call.initial, call.options["backend"])
        found = returned(call, finished(call, out, end))
    if signature is not None and is_recordable(call):
        with contextlib.suppress(MemoryError):  # the call has been computed
            _record(call, signature, arrays, keywords, core, found, end is call.given_state)
    return found


def _record(
    call: Call, signature: Signature, arrays: tuple[Any, ...], keywords: Mapping[str, Any], core: Any, found: Any,
    is_own: bool,
) -> None:  # fmt: skip
    """Record a computed call, if it can be replayed: its kernels, if they are all that it computed, else a template.

    found: the public result. is_own: whether the core's final state is the caller's own array.
    """
    if not is_storable(signature):
        return
    plan: Any = None
    reason, overwrites = "", call.options["overwrite_state"]
    names = names_of(call.spec, signature, arrays, keywords)
    try:
        plan = _whole(call, signature, found, is_own, names)
    except LookupError as why:
        reason = str(why)
    several = isinstance(call.given_state, tuple) or call.options["return_states_at"] is not None
    if plan is None and names is not None and not (overwrites and several):
        plan = Template(signature[0], call, names, core).run
    plans.store(signature[0], plan or plans.computed_in_full, reason)


def _whole(call: Call, signature: Signature, found: Any, is_own: bool, names: Any) -> Any:
    """The plan of everything that a call computed.   Raises LookupError, with the reason, where there is none."""
    _, given, state, pointers = signature
    overwritten = state if call.options["overwrite_state"] else None
    if call.recorder is None:
        raise LookupError(f"the arrays are of {call.library.name}")
    if not call.recorder.launches:
        raise LookupError(call.recorder.obstacle or "no kernel computed the call")
    if names is None and pointers is None:
        raise LookupError("an option is an array")
    if overwritten is not None and pointers is not None and not is_own:
        from ..ops.cuda import formulas  # which copies final states

        if call.rows is not None or not formulas.takes(*call.state_parts.values()):
            raise LookupError("the final state is copied into the caller's array")
    return launches_of(call.xp).LaunchSequence(call.recorder, given, found, overwritten)


def _run_piece(spec: VariantSpec, keywords: dict[str, Any]) -> Any:
    """A piece of a call, without a pullback."""
    return run(spec, (), keywords), None


def limit(spec: VariantSpec, keywords: Mapping[str, Any]) -> contextlib.AbstractContextManager[None]:
    """A context with the option num_threads applied."""
    count = keywords.get("num_threads")
    return NO_LIMIT if count is None else threads.limited(threads_of(spec.name, count))
