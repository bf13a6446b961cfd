"""Record a computed call: its kernels, if they are all that it computed, else a template."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from ...core import Computation
from ...runtime.arrays import is_cupy
from ..binding import Prepared
from ..results import Result, StatesResult
from . import plans
from .plans import Signature, is_storable, names_of, vjp_key
from .template import Template

Computed = tuple[Computation, Result | StatesResult, bool]


def record(
    call: Prepared, signature: Signature, arrays: tuple[Any, ...], keywords: Mapping[str, Any], computed: Computed
) -> None:
    """Record the plan of a call, if it can be replayed.

    computed: the core, the public result, and whether the final state is the caller's own array.
    """
    if not is_storable(signature):
        return
    core, found, is_own = computed
    plan: Any = None
    reason, overwrites = "", call.options["overwrite_state"]
    names = names_of(call.spec, signature, arrays, keywords)
    try:
        plan = _whole(call, signature, found, is_own, names)
    except LookupError as why:
        reason = str(why)
    several = isinstance(call.given_state, tuple) or isinstance(found, StatesResult)
    if plan is None and names is not None and not (overwrites and several):
        plan = Template(signature[0], call, names, core).run
    returns_state = not isinstance(found, StatesResult) and (found.out is None or call.options["return_state"])
    is_limited = call.options["num_threads"] is not None
    plans.store(signature[0], plans.Recorded(plan or plans.computed_in_full, returns_state, is_limited, reason))


def _whole(call: Prepared, signature: Signature, found: Any, is_own: bool, names: Any) -> Any:
    """The plan of everything that a call computed.   Raises LookupError, with the reason, where there is none."""
    _, given, state, _ = signature
    overwrites, states = call.options["overwrite_state"], isinstance(found, StatesResult)
    if call.recorder is None:
        raise LookupError(f"the arrays are of {call.library.name}")
    if not call.recorder.launches:
        raise LookupError(call.recorder.obstacle or "no kernel computed the call")
    if is_cupy(call.plan.xp):
        from ...ops.cuda import formulas  # which copies final states
        from . import device

        if states:
            return device.StatesPlan(call.recorder, given, found).run
        if overwrites and not is_own and (call.rows is not None or not formulas.takes(*call.state_parts.values())):
            raise LookupError("the final state is copied into the caller's array")
        return device.Plan(call.recorder, given, state, found, overwrites).run
    if names is None:
        raise LookupError("an option is an array")
    from . import host

    results: Any = (found, None) if states else found
    written = () if not overwrites else state if isinstance(state, tuple) else (state,)
    return host.Plan(call.recorder, given, results, written).run


def record_forward(
    call: Prepared, signature: Signature, arrays: tuple[Any, ...], keywords: Mapping[str, Any], core: Computation,
    results: Any, residuals: Any,
) -> Any:  # fmt: skip
    """Record the forward of a vjp: returns what its pullback is recorded with, or None for a template.

    results: the public ones. residuals: everything that the pullback may read.
    """
    if not plans.ENABLED:
        return None
    template, found = template_of(call, signature, arrays, keywords, core), None
    if call.recorder is not None and call.recorder.launches:
        with contextlib.suppress(LookupError):
            found = _forward(call, signature, results, residuals, template)
    if found is None:
        record_template(call, signature, arrays, keywords, core)
    return found


def record_template(
    call: Prepared, signature: Signature, arrays: tuple[Any, ...], keywords: Mapping[str, Any], core: Computation
) -> None:
    """Record the template of a vjp, if there is one and no other plan."""
    at_positions = is_cupy(call.plan.xp) and call.plan.states_at is not None
    template = template_of(call, signature, arrays, keywords, core)
    if template is not None and vjp_key(signature) not in plans.by_key and not at_positions:
        plans.store(vjp_key(signature), template)


def template_of(
    call: Prepared, signature: Signature, arrays: tuple[Any, ...], keywords: Mapping[str, Any], core: Computation
) -> Template | None:
    """The template of a vjp; None for arrays that cannot be bound to it."""
    names = names_of(call.spec, signature, arrays, keywords)
    return None if names is None else Template(vjp_key(signature), call, names, core)


def _forward(call: Prepared, signature: Signature, results: Any, residuals: Any, template: Any) -> Any:
    """What a pullback is recorded with.   Raises LookupError if the forward cannot be replayed."""
    key, given = vjp_key(signature), signature[1]
    forward = plans.by_key.get(key)
    if is_cupy(call.plan.xp):
        from . import device

        return device.recorded_forward(key, forward, given, call.recorder, results, residuals)
    from . import host

    if template is None:
        return None
    if forward is None:
        forward = host.Forward(key, call.recorder, given, results, template)
    if not isinstance(forward, host.Forward) or None in forward.pullbacks.values():
        return None
    if [(y.shape, y.dtype) for y in call.recorder.allocated] != forward.sequence.allocations:
        return None  # a first call of the process may compute otherwise
    return host.Residuals(forward, [*given, *call.recorder.allocated])
