"""vjp: the result of a call and its pullback, replayed if both were recorded."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from ..ops.sums import added
from ..runtime.arrays import Array, is_mutable
from ..runtime.recorder import Recorder
from ..runtime.shapes import flatten, unflatten
from ..runtime.unchanged import check_unchanged, mark
from ..runtime.values import shown
from ..spec import Call, VariantSpec
from . import head_parts, parts, pieces_vjp
from .binding import inputs_of, is_cut, is_recordable, lacks_states, normalise, prepare
from .dispatch import NO_LIMIT, core_of, limit, ndarray, value_of
from .foreign import bridge_of, symbolic_bridge
from .positions import core_cotangents
from .replay import plans
from .replay.plans import Signature, signature_of, split, vjp_key
from .replay.template import Template
from .replay.vjp import record_forward, record_pullback
from .results import (
    Result,
    StatesResult,
    copied,
    cotangents,
    final_state,
    finish_at,
    finished,
    form_of,
    gradients,
    returned,
)

Pullback = Callable[..., Any]


def vjp(fn: Callable[..., Any], *arrays: Any, **options: Any) -> tuple[Any, Pullback]:
    """The result of fn(*arrays, **options), and its pullback.

    result is the result of the plain call: out, or (out, state) with return_state=True. pullback(dout,
    dstate=None) returns a named tuple of gradients by input name, of every array that was given and of the state, each
    in its input's shape and dtype; None for inputs that were not given. It may be called any number of times, and
    gradients can be pickled and copied; the pullback itself can't be pickled.

    The pullback reads the inputs: arrays and state must not change until its last call. If a NumPy input was changed
    in place, it raises a RuntimeError that names the input. Arrays of up to 4096 elements are compared whole, larger
    ones at 4096 evenly spaced elements; CuPy arrays are not compared. The result may be written to.
    Raises TypeError if fn is not a function of this library, and every error of fn.
    """
    if (spec := getattr(fn, "spec", None)) is not None:
        return vjp_of(spec, arrays, options)
    if (rule := getattr(fn, "vjp", None)) is None:
        raise TypeError(f"vjp: fn is {shown(getattr(fn, '__name__', fn))}, expected a function of linattn_np")
    return rule(arrays, options)


def vjp_of(spec: VariantSpec, arrays: tuple[Any, ...], keywords: Mapping[str, Any]) -> tuple[Any, Pullback]:
    """(what the public function returns, pullback) where `run_vjp` may compute two outputs as one array."""
    found = run_vjp(spec, arrays, keywords)
    if keywords.get("return_lse") is not True:
        return found
    from . import lse

    return lse.split_vjp(spec.name, found, value_of(spec, arrays, keywords))


def run_vjp(spec: VariantSpec, arrays: tuple[Any, ...], keywords: Mapping[str, Any]) -> tuple[Any, Pullback]:
    """(what the public function returns, pullback)."""
    first = type(arrays[0] if arrays else next(iter(keywords.values()), None))
    if first is not ndarray and (bridge := bridge_of(arrays, keywords)) is not None:
        found = bridge.run_vjp(spec.name, spec, functools.partial(run_vjp, spec), arrays, keywords)
        if found is not NotImplemented:
            return found
    signature = signature_of(spec, arrays, keywords)
    plan = None if signature is None else plans.by_key.get(vjp_key(signature))
    if signature is None and (bridge := symbolic_bridge(arrays, keywords)) is not None:
        found = bridge.run_vjp(spec, arrays, keywords)
        if found is not NotImplemented:
            return found
    if plan is None or signature is None:
        if keywords.get("reverse") is True:
            from . import reverse

            return reverse.run_vjp(run_vjp, spec, arrays, keywords, signature)
        with limit(spec, keywords):  # num_threads is checked first, as in `run`
            call = _with_backward(prepare(spec, arrays, keywords))
        if is_cut(call):
            return pieces_vjp.vjp(call, keywords, _run_piece, final_state)
        for module, is_so in ((parts, spec.change.by_tokens), (head_parts, spec.change.by_heads)):
            if is_so and len(each := module.parts_of(call)) > 1:
                threads = functools.partial(limit, spec, {"num_threads": call.options["num_threads"]})
                return module.vjp(call, each, by_name(spec, arrays, keywords), threads, _gradients)
        return _in_full(call, signature, arrays, keywords)
    if type(plan) is plans.Composed:
        return plan.vjp(signature)
    if type(plan) is not Template:
        return _recorded(plan, spec, signature, arrays, keywords)
    with limit(spec, keywords):
        return _of(plan, *split(signature), by_name(spec, arrays, keywords))


def _recorded(
    plan: Any, spec: VariantSpec, signature: Signature, arrays: tuple[Any, ...], keywords: Mapping[str, Any]
) -> tuple[Any, Pullback]:
    """(public result, pullback) by a recorded forward; in full, or by its template, if it cannot be replayed."""
    found = None
    if plan.replayable:
        with limit(spec, keywords):
            found = plan(signature[1], signature[3])
    if found is None:
        return _in_full(_with_backward(prepare(spec, arrays, keywords)), signature, arrays, keywords)
    (results, residuals), marks = found, mark(by_name(spec, arrays, keywords))

    def gradients_of(*cotangents: Any) -> Any:
        check_unchanged(spec.name, marks)
        with limit(spec, keywords):
            grads = residuals.pullback(cotangents)
        if grads is None:  # cotangents of another layout: computed in full, including the forward
            call = _with_backward(prepare(spec, arrays, keywords))
            grads = _in_full(call, signature, arrays, keywords)[1](*cotangents)
        return grads

    if len(results) == 3:
        return results, _of_states(gradients_of)

    def pullback(dout: Any = None, dstate: Any = None) -> Any:
        """Gradients by input name, of every array that was given and of the state."""
        return gradients_of(dout, dstate)

    return results if results[0] is None or keywords.get("return_state") else results[0], pullback


def _of(template: Template, arrays: list[Array], state: Any, given: Mapping[str, Any]) -> tuple[Any, Pullback]:
    """(public result, pullback) of a call with a known signature."""
    call = template.bind(arrays, state)
    computed = template.forward(call)
    found = finished(call, *computed[:2])
    return _with_pullback(call, template.core, computed, found, given, backward=template.backward)


def _of_states(gradients_of: Pullback) -> Pullback:
    """The pullback of a call with states at positions."""

    def pullback(dout: Any = None, dstate: Any = None, dstates: Any = None) -> Any:
        """Gradients by input name, of every array that was given and of the state."""
        return gradients_of(dout, dstate, dstates)

    return pullback


def _run_piece(spec: VariantSpec, keywords: dict[str, Any]) -> tuple[Any, Pullback]:
    """A piece of a call, with its pullback."""
    return run_vjp(spec, (), keywords)


def _with_backward(call: Call) -> Call:
    """The call with a plan for a forward that a backward follows.   Raises ValueError for a state in place."""
    spec = call.spec
    if call.options["overwrite_state"]:
        raise ValueError(
            f"{spec.name}: overwrite_state=True was given to vjp, expected False: "
            "the pullback needs the state that would be overwritten"
        )
    for name, instead in (("state_rows", "take the rows of the pool yourself, as in state=pool[rows]"),
                          ("fresh", "set the states of sequences that begin without one to zero")):  # fmt: skip
        if call.options[name] is not None:
            raise ValueError(f"{spec.name}: {name} was given to vjp, expected None: {instead}")
    constant_gate = spec.change.gate is not None and getattr(call, spec.change.gate) is None
    return call.changed(plan=call.plan._replace(gradients=True, gate_gradient=not constant_gate))


def _in_full(
    call: Call, signature: Signature | None, arrays: tuple[Any, ...], keywords: Mapping[str, Any]
) -> tuple[Any, Pullback]:
    """The result and the pullback of a checked call; both are recorded if they can be replayed."""
    spec, recorded = call.spec, None
    with limit(spec, keywords), call.recorder or NO_LIMIT:
        x = inputs_of(call)
        core = core_of(x)
        lacks = lacks_states(call, core, x)
        if not lacks:
            computed = core.forward(spec.name, x, call.plan, call.initial, call.options["backend"])
            found = finished(call, *computed[:2])
    if lacks:
        return pieces_vjp.vjp(call, keywords, _run_piece, final_state, _without_gradients(call, core, x))
    if signature is not None and is_recordable(call):
        read = computed[0] if spec.change.from_core else None, computed[1] if spec.state.unpack_vjp else None
        saved = computed[2], vars(call), *read
        recorded = record_forward(call, signature, arrays, keywords, core, found, saved)
    return _with_pullback(call, core, computed, found, by_name(spec, arrays, keywords), recorded)


def _without_gradients(call: Call, core: Any, x: Any) -> Any:
    """The public result of a call without a backward; None if that is computed in pieces too."""
    plain = call.changed(plan=call.plan._replace(gradients=False))
    if lacks_states(plain, core, x):
        return None
    with limit(call.spec, {"num_threads": call.options["num_threads"]}):
        return finish_at(plain, *core.forward(call.name, x, plain.plan, call.initial, call.options["backend"])[:2])


def _with_pullback(
    call: Call, core: Any, computed: Any, found: Any, given: Mapping[str, Any], recorded: Any = None,
    backward: Any = None,
) -> tuple[Any, Pullback]:  # fmt: skip
    """(public result, pullback).

    computed: the core's (out, final state, residuals). found: the public (out, state), or StatesResult. given: the
    caller's arrays by name. recorded: the forward with which the pullback is recorded.
    backward: of the core, if it is recorded.
    """
    if isinstance(found, StatesResult):
        return _with_states(call, core, computed, found, given, recorded, backward)
    spec, (core_out, end, residuals) = call.spec, computed
    form = None if core_out is None else form_of(call.library, found[0])
    core_out = core_out if spec.change.from_core else None
    marks = mark(given)
    out, state = _copied_if_read(call, core, residuals, *found) if is_mutable(call.xp) else found
    threads = {"num_threads": call.options["num_threads"]}
    call, pull = call.changed(recorder=None), backward or core.backward

    def pullback(dout: Any = None, dstate: Any = None) -> Any:
        """Gradients by input name, of every array that was given and of the state."""
        check_unchanged(spec.name, marks)
        if recorded is not None and (replayed := recorded.pullback((dout, dstate))) is not None:
            return replayed
        recorder = None if recorded is None else Recorder()
        if recorded is not None:
            dout, dstate = recorded.apart((dout, dstate))
        with limit(spec, threads), recorder or NO_LIMIT:
            given = cotangents(call, dout, dstate, form, end)
            beside = dout, *(dstate if isinstance(dstate, tuple) else (dstate,))
            all_grads = gradients(call, *_gradients(call, pull, residuals, core_out, given), beside)
        if recorder is not None:
            record_pullback(recorded, call, core, (dout, dstate), recorder, all_grads)
        return all_grads

    return returned(call, Result(out, state)), pullback


def _gradients(
    call: Call, backward: Any, residuals: Any, core_out: Any, given: tuple[Any, Any, Any]
) -> tuple[Any, Any]:
    """(gradients by name, the core's dstate_0) from (dout, the core's dstate, gradients so far)."""
    change, c, (d_out, d_state, grads) = call.spec.change, call, given
    del given  # large arrays are freed as soon as nothing needs them
    if change.from_core_vjp and d_out is not None:
        d_out, more = change.from_core_vjp(c, core_out, d_out)
        _add(call.xp, grads, more)
        del more
    c = c.changed(**{n: grads.pop(n) for n in [*grads] if n not in (*call.spec.arrays, "state")})
    d, dstate0 = backward(residuals, d_out, d_state)
    del d_out
    _add(call.xp, grads, change.to_core_vjp(c, d))
    return grads, dstate0


def _with_states(
    call: Call, core: Any, computed: Any, result: StatesResult, given: Mapping[str, Any], recorded: Any = None,
    backward: Any = None,
) -> tuple[Any, Pullback]:  # fmt: skip
    """(public result, pullback) of a call with states at positions; arguments as those of _with_pullback."""
    spec, (core_out, ends, residuals) = call.spec, computed
    form = None if core_out is None else form_of(call.library, result.out)
    core_out = core_out if spec.change.from_core else None
    marks, (out, state, states) = mark(given), result
    call, pull = call.changed(recorder=None), backward or core.backward
    if is_mutable(call.xp):
        out, state = _copied_if_read(call, core, residuals, out, state)
        if spec.state.unpack_at_vjp is not None:  # which reads them
            states = unflatten(states, [copied(call.library, S) for S in flatten("states", states).values()])

    def gradients_of(*given: Any) -> Any:
        check_unchanged(spec.name, marks)
        if recorded is not None and (replayed := recorded.pullback(given)) is not None:
            return replayed
        given = given if recorded is None else recorded.apart(given)
        (dout, dstate, dstates), recorder = given, None if recorded is None else Recorder()
        d_out, d_end, grads = None, None, dict[str, Array]()
        if dout is not None or dstate is not None:
            d_out, d_end, grads = cotangents(call, dout, dstate, form, ends.end)
        elif dstates is None:
            raise TypeError(f"{spec.name}: the pullback got no cotangent, expected dout, dstate or dstates")
        with limit(spec, {"num_threads": call.options["num_threads"]}), recorder or NO_LIMIT:
            d_ends, more = core_cotangents(call, d_end, dstates, states, ends.at)
            _add(call.xp, grads, more)
            all_grads = gradients(call, *_gradients(call, pull, residuals, core_out, (d_out, d_ends, grads)))
        if recorder is not None:
            record_pullback(recorded, call, core, given, recorder, all_grads)
        return all_grads

    return StatesResult(out, state, states), _of_states(gradients_of)


def by_name(spec: VariantSpec, arrays: tuple[Any, ...], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """The caller's arrays and state by name."""
    given = dict(zip(spec.arrays, arrays, strict=False))
    given |= {n: x for n, x in keywords.items() if n in spec.arrays}
    if (state := keywords.get("state")) is not None:
        given |= flatten("state", normalise(spec, "state", state, {**spec.options, **keywords}))
    return given


def _copied_if_read(call: Call, core: Any, residuals: Any, out: Any, state: Any) -> tuple[Any, Any]:
    """The public (out, state), copied where the pullback reads them: the caller may write to them."""
    own = functools.partial(copied, call.library)
    if core.reads_out(residuals):
        out = own(out)
    if state is not None and (call.spec.state.unpack_vjp is not None or core.reads_end(residuals)):
        state = unflatten(state, [own(S) for S in flatten("state", state).values()])
    return out, state


def _add(xp: Any, grads: dict[str, Array], more: Mapping[str, Array]) -> None:
    """grads += more, by name."""
    for name, y in more.items():
        grads[name] = y if name not in grads else added(xp, grads[name], y)
