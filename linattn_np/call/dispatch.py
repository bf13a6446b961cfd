"""A public call: replay a recorded plan if its signature is known, else bind, compute, finish and record."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ..matrix_state import core as matrix_state
from ..runtime import threads
from ..spec import Samples, VariantSpec
from . import replay
from .binding import Prepared, prepare
from .options import COMMON, threads_of
from .results import Result, finish

NO_LIMIT = contextlib.nullcontext()
F = TypeVar("F", bound=Callable[..., Any])


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
    parameters = [inspect.Parameter(name, one, default=None if arg.optional else inspect.Parameter.empty)
                  for name, arg in spec.arrays.items()]
    options = {**spec.options.defaults, **COMMON}
    return inspect.Signature(parameters + [inspect.Parameter(n, keyword, default=v) for n, v in options.items()])


def core_of(inputs: Any) -> Any:
    """The core of a call: the one named by the type of `inputs`, else the matrix-state core."""
    return getattr(type(inputs), "core", None) or matrix_state


def run(spec: VariantSpec, arrays: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
    """The result of the public function: out, or (out, state)."""
    signature = replay.signature(spec, arrays, keywords)
    if signature is not None and (plan := replay.find(signature)) is not None:
        if keywords.get("num_threads") is None:
            found = plan(*signature[1:])
        else:
            with limit(spec, keywords):
                found = plan(*signature[1:])
        if found is not None:
            return Result(*found) if found[0] is None or keywords.get("return_state") else found[0]
    with limit(spec, keywords):
        call = prepare(spec, arrays, keywords)
        with call.recorder or NO_LIMIT:
            x = call.inputs()
            out, end, residuals = core_of(x).forward(spec.name, x, call.plan, call.state, call.options["backend"])
            result = finish(call, out, end)
        if signature is not None and not call.doubtful_layout:
            _record(call, signature, x, end, residuals, result)
        return result


def limit(spec: VariantSpec, keywords: Mapping[str, Any]) -> contextlib.AbstractContextManager[None]:
    """A context with the option num_threads applied."""
    count = keywords.get("num_threads")
    return NO_LIMIT if count is None else threads.limited(threads_of(spec.name, count))


def _record(call: Prepared, signature: replay.Signature, x: Any, end: Any, residuals: Any, result: Any) -> None:
    """Record the plan of a call, if it can be replayed."""
    if call.recorder is None:
        replay.store_bound(call, signature, x, residuals)
        return
    from . import device_replay

    own_state = end is call.given_state
    if call.options["overwrite_state"] == own_state:
        out, state = result if isinstance(result, Result) else (result, None)
        device_replay.store(signature, call.recorder, out, state, own_state)
