"""Calls whose initial state other ranks have: kernels that cut sequences into segments ask for it.

They sum up their segments in a first pass, which a call on one rank has too: no token is read once more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..spec import Call, VariantSpec
from .binding import inputs_of, prepare
from .dispatch import limit
from .results import Result, finish
from .vjp import _with_backward, _with_pullback, by_name


def prepared(spec: VariantSpec, keywords: Mapping[str, Any], gradients: bool) -> tuple[Call, Any] | None:
    """(a checked call, its inputs); None if no kernels ask for its state, or that is no matrix of a head alone."""
    state, options = spec.state, {**spec.options, **keywords}
    is_own = (state.pack, state.unpack) == (None, None) or (state.plain is not None and state.plain(options))
    if not is_own or state.type_of(options) is not None:
        return None
    call = prepare(spec, (), keywords)
    call = (_with_backward(call) if gradients else call).changed(recorder=None)
    x = inputs_of(call)
    asks = getattr(x.computation, "asks_for_state", None)  # of the core that has such kernels
    if asks is None or not asks(spec.name, x, call.plan, call.options["backend"]):
        return None
    return call, x


def run(call: Call, x: Any, neighbours: Any) -> tuple[Any, Any]:
    """The public (out, state)."""
    with limit(call.spec, call.options):
        plan = call.plan._replace(neighbours=neighbours)
        return finish(call, *x.computation.forward(call.name, x, plan, None, call.options["backend"])[:2])


def run_vjp(call: Call, x: Any, neighbours: Any, keywords: Mapping[str, Any]) -> tuple[Any, Callable[..., Any]]:
    """(public result, pullback), of a call with return_state."""
    call = call.changed(plan=call.plan._replace(neighbours=neighbours))
    with limit(call.spec, call.options):
        computed = x.computation.forward(call.name, x, call.plan, None, call.options["backend"])
        found = Result(*finish(call, *computed[:2]))
    return _with_pullback(call, x.computation, computed, found, by_name(call.spec, (), keywords))
