"""A call and its residuals as values, for bridges that store residuals themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ..call.binding import inputs_of, is_cut, is_recordable, prepare
from ..call.dispatch import NO_LIMIT, core_of, limit
from ..call.replay import plans
from ..call.replay.plans import names_of, signature_of, split
from ..call.replay.vjp import record_template
from ..call.results import Form, cotangents, finish, form_of, gradients
from ..call.vjp import _gradients, _with_backward
from ..core import Computation
from ..spec import Call, VariantSpec

Found = tuple[Any, Any]  # the public (out, state)


class Linearised(NamedTuple):
    """A computed call, with its residuals."""

    call: Call
    core: Computation
    computed: Any  # the core's (out, final state, residuals)
    form: Form | None  # of the public output

    def gradients(self, dout: Any, dstate: Any, recorder: Any = NO_LIMIT) -> Any:
        """Gradients by input name, of every array that was given and of the state."""
        call, core, (core_out, end, residuals), form = self
        given = cotangents(call, dout, dstate, form, end)
        with limit(call.spec, {"num_threads": call.options["num_threads"]}), recorder:
            grads = _gradients(call, core.backward, residuals, core_out, given)
        return gradients(call, *grads)


def linearise(spec: VariantSpec, keywords: Mapping[str, Any]) -> tuple[Linearised, Found] | None:
    """(call, its (out, state)), which may share memory; None in pieces, in reverse, or with states at positions."""
    if keywords.get("reverse") is True or keywords.get("return_states_at") is not None:
        return None
    signature = signature_of(spec, (), keywords)
    key = None if signature is None else ("linearised", signature[0])
    if signature is not None and (plan := plans.by_key.get(key)) is not None:
        call = plan.bind(*split(signature))
        with limit(spec, keywords):
            computed = plan.forward(call)
            return _linearised(call, plan.core, computed, finish(call, *computed[:2]))
    with limit(spec, keywords):
        call = prepared(spec, keywords, True)
    if is_cut(call):
        return None
    linearised, found, _ = computed_call(call)
    if signature is not None and is_recordable(call):
        record_template(key, call, names_of(spec, signature, (), keywords), linearised.core)
    return linearised, found


def prepared(spec: VariantSpec, keywords: Mapping[str, Any], with_backward: bool) -> Call:
    """A checked call, for a forward that a backward follows, or not."""
    call = prepare(spec, (), keywords)
    return _with_backward(call) if with_backward else call


def computed_call(call: Call) -> tuple[Linearised, Found, Any]:
    """(call, its (out, state), the core's residuals) of a checked call."""
    with limit(call.spec, call.options), call.recorder or NO_LIMIT:
        x = inputs_of(call)
        core = core_of(x)
        computed = core.forward(call.name, x, call.plan, call.initial, call.options["backend"])
        return *_linearised(call, core, computed, finish(call, *computed[:2])), computed[2]


def _linearised(call: Call, core: Computation, computed: Any, found: Found) -> tuple[Linearised, Found]:
    """(call, found); the core's output is a residual only if the pullback reads it."""
    form = None if computed[0] is None else form_of(call.library, found[0])
    residuals = computed if call.spec.change.from_core else (None, *computed[1:])
    return Linearised(call, core, residuals, form), found
