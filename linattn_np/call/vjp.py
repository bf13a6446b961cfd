"""vjp: the result of a call and its pullback, replayed if both were recorded."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ..core import Computation
from ..runtime.arrays import Array, is_mutable
from ..runtime.unchanged import check_unchanged, mark
from ..spec import VariantSpec
from . import pieces_vjp, replay
from .binding import Prepared, flatten, normalise, prepare, unflatten
from .dispatch import NO_LIMIT, _final, core_of, finish, limit, new
from .lazy import lazy_bridge
from .results import Result, copied, cotangents, gradients, shape_of
from .traced import tracing_bridge

Pullback = Callable[..., Any]


def vjp(fn: Callable[..., Any], *arrays: Any, **options: Any) -> tuple[Any, Pullback]:
    """The result of fn(*arrays, **options), and its pullback.

    result is the result of the plain call: out, or (out, state) with return_state=True. pullback(dout,
    dstate=None) returns a named tuple of gradients by input name, of every array that was given and of the state, each
    in its input's shape and dtype; None for inputs that were not given. It may be called any number of times, and
    gradients can be pickled and copied.

    The pullback reads the inputs: arrays and state must not change until its last call. If a NumPy input was changed
    in place, it raises a RuntimeError that names the input. Arrays of up to 4096 elements are compared whole, larger
    ones at 4096 evenly spaced elements; arrays of other libraries are not compared. The result may be written to.
    Raises TypeError if fn is not a function of this library, and every error of fn.
    """
    if (spec := getattr(fn, "spec", None)) is not None:
        return run_vjp(spec, arrays, options)
    if (rule := getattr(fn, "vjp", None)) is None:
        raise TypeError(f"vjp: fn is {getattr(fn, '__name__', fn)!r}, expected a function of linattn_np")
    return rule(arrays, options)


def run_vjp(spec: VariantSpec, arrays: tuple[Any, ...], keywords: Mapping[str, Any]) -> tuple[Any, Pullback]:
    """(what the public function returns, pullback)."""
    signature = replay.signature(spec, arrays, keywords)
    plan = None if signature is None else replay.plans.get(replay.vjp_key(signature))
    if signature is None and (bridge := tracing_bridge(arrays, keywords)) is not None:
        return bridge.run_vjp(spec, arrays, keywords)
    if signature is None and (bridge := lazy_bridge(arrays, keywords)) is not None:
        lazy = bridge.run_vjp(spec, arrays, keywords)
        if lazy is not NotImplemented:
            return lazy
    if plan is None or signature is None:
        if keywords.get("reverse") is True:
            from . import reverse

            return reverse.run_vjp(run_vjp, spec, arrays, keywords, signature)
        with limit(spec, keywords):  # num_threads is checked first, as in `run`
            call = with_backward(prepare(spec, arrays, keywords))
        if call.is_cut:
            return pieces_vjp.vjp(call, keywords, _run_piece, _final)
        return _in_full(call, signature, arrays, keywords)
    if type(plan) is replay.Template:
        return _with_pullback(*_replayed(plan, signature, keywords), by_name(spec, arrays, keywords))
    if type(plan) is replay.Composed:
        return plan.vjp(signature)
    if not plan.replayable:
        return _in_full(with_backward(prepare(spec, arrays, keywords)), signature, arrays, keywords)
    found, residuals = plan(arrays, keywords, signature[3])

    def pullback(dout: Any = None, dstate: Any = None) -> Any:
        """Gradients by input name, of every array that was given and of the state."""
        grads = residuals.pullback((dout, dstate))
        if grads is None:  # cotangents of another layout: computed in full, including the forward
            call = with_backward(prepare(spec, arrays, keywords))
            grads = _in_full(call, signature, arrays, keywords)[1](dout, dstate)
        return grads

    return new(Result, found) if found[0] is None or keywords.get("return_state") else found[0], pullback


def _run_piece(spec: VariantSpec, keywords: dict[str, Any]) -> tuple[Any, Pullback]:
    """A piece of a call, with its pullback."""
    return run_vjp(spec, (), keywords)


def with_backward(call: Prepared) -> Prepared:
    """The call with a plan for a forward that a backward follows.   Raises ValueError for a state in place."""
    spec = call.spec
    if call.options["overwrite_state"]:
        raise ValueError(f"{spec.name}: overwrite_state=True was given to vjp, expected False: "
                         "the pullback needs the state that would be overwritten")
    if call.options["state_rows"] is not None:
        raise ValueError(f"{spec.name}: state_rows was given to vjp, expected None: "
                         "take the rows of the pool yourself, as in state=pool[rows]")
    constant_gate = spec.change.gate is not None and getattr(call.variables, spec.change.gate) is None
    return call._replace(plan=call.plan._replace(gradients=True, gate_gradient=not constant_gate))


class Linearised(NamedTuple):
    """A computed call, with what its pullback reads."""

    call: Prepared
    core: Computation
    computed: Any  # the core's (out, final state, residuals)
    shape: tuple[int, ...] | None  # of the public output

    def gradients(self, dout: Any, dstate: Any, recorder: Any = NO_LIMIT) -> Any:
        """Gradients by input name, of every array that was given and of the state."""
        call, core, (core_out, end, residuals), shape = self
        spec, c = call.spec, call.variables
        d_out, d_state, grads = cotangents(call, dout, dstate, shape, end)
        with limit(spec, {"num_threads": call.options["num_threads"]}), recorder:
            if spec.change.from_core_vjp and d_out is not None:
                d_out, more = spec.change.from_core_vjp(c, core_out, d_out)
                c = c.extended({n: more.pop(n) for n in [*more] if n not in spec.arrays})
                _add(grads, more)
            d, dstate0 = core.backward(residuals, d_out, d_state)
            _add(grads, spec.change.to_core_vjp(c, d))
        return gradients(call, grads, dstate0)


def linearise(
    spec: VariantSpec, arrays: tuple[Any, ...], keywords: Mapping[str, Any]
) -> tuple[Linearised, tuple[Any, Any]] | None:
    """(call, its (out, state)), which may share memory; None if it is computed piece by piece, or in reverse."""
    if keywords.get("reverse") is True:
        return None
    signature = replay.signature(spec, arrays, keywords)
    plan = None if signature is None else replay.plans.get(replay.vjp_key(signature))
    if signature is not None and type(plan) is replay.Template:
        return _replayed(plan, signature, keywords)
    with limit(spec, keywords):
        call = with_backward(prepare(spec, arrays, keywords))
    return None if call.is_cut else computed_call(call, signature, arrays, keywords)


def _replayed(
    plan: replay.Template, signature: replay.Signature, keywords: Mapping[str, Any]
) -> tuple[Linearised, tuple[Any, Any]]:
    """A call on other arrays of a template, and its (out, state)."""
    call = plan.bind(*replay.split(signature))
    with limit(call.spec, keywords):
        computed = plan.forward(call)
        return _linearised(call, plan.core, computed, finish(call, *computed[:2]))


def _linearised(
    call: Prepared, core: Computation, computed: Any, found: tuple[Any, Any]
) -> tuple[Linearised, tuple[Any, Any]]:
    """(call, found); the core's output is kept only if the pullback reads it."""
    shape = None if computed[0] is None else shape_of(call.library, found[0])
    kept = computed if call.spec.change.from_core else (None, *computed[1:])
    return Linearised(call, core, kept, shape), found


def computed_call(
    call: Prepared, signature: replay.Signature | None, arrays: tuple[Any, ...], keywords: Mapping[str, Any],
    is_recorded: Callable[[Linearised, tuple[Any, Any]], bool] = lambda linearised, found: False,
) -> tuple[Linearised, tuple[Any, Any]]:
    """A checked call and its (out, state); its template is stored if it can be replayed, unless `is_recorded`."""
    spec = call.spec
    with limit(spec, keywords), call.recorder or NO_LIMIT:
        x = call.inputs()
        core = core_of(x)
        computed = core.forward(spec.name, x, call.plan, call.state, call.options["backend"])
        linearised, found = _linearised(call, core, computed, finish(call, *computed[:2]))
    if signature is None or not call.is_recordable or is_recorded(linearised, found):
        return linearised, found
    names = replay.names_of(spec, signature, arrays, keywords)
    if names is not None and replay.vjp_key(signature) not in replay.plans:
        replay.store(replay.vjp_key(signature), replay.Template(call, names, core, computed[2]))
    return linearised, found


def _in_full(
    call: Prepared, signature: replay.Signature | None, arrays: tuple[Any, ...], keywords: Mapping[str, Any]
) -> tuple[Any, Pullback]:
    """The result and the pullback of a checked call; both are recorded if they can be replayed."""
    device: Any = None

    def is_recorded(linearised: Linearised, found: tuple[Any, Any]) -> bool:
        """Whether the launches of a call on CuPy arrays are recorded."""
        nonlocal device
        if call.recorder is None or signature is None:
            return False
        from . import device_replay

        core_out, _, residuals = linearised.computed
        saved = residuals, vars(call.variables), core_out
        given = device_replay.given_arrays(arrays, keywords)
        device = device_replay.record_forward(signature, given, call.recorder, found, saved)
        return device is not None

    linearised, found = computed_call(call, signature, arrays, keywords, is_recorded)
    return _with_pullback(linearised, found, by_name(call.spec, arrays, keywords), device)


def _with_pullback(
    linearised: Linearised, found: tuple[Any, Any], given: Mapping[str, Any], device: Any = None
) -> tuple[Any, Pullback]:
    """(public result, pullback).

    found: the public (out, state). given: the caller's arrays by name. device: what records the pullback of a call on
    CuPy arrays.
    """
    call, core, computed, _ = linearised
    fn, marks = call.spec.name, mark(given)
    out, state = _apart(call, core, computed[2], *found) if is_mutable(call.plan.xp) else found

    def pullback(dout: Any = None, dstate: Any = None) -> Any:
        """Gradients by input name, of every array that was given and of the state."""
        if device is not None and (replayed := device.pullback((dout, dstate))) is not None:
            return replayed
        check_unchanged(fn, marks)
        recorder = None if device is None else type(call.recorder)()
        grads = linearised.gradients(dout, dstate, recorder or NO_LIMIT)
        if recorder is not None:
            device.store_pullback((dout, dstate), recorder, grads)
        return grads

    return Result(out, state) if out is None or call.options["return_state"] else out, pullback


def by_name(spec: VariantSpec, arrays: tuple[Any, ...], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """The caller's arrays and state by name."""
    given = dict(zip(spec.arrays, arrays, strict=False))
    given |= {n: x for n, x in keywords.items() if n in spec.arrays}
    if (state := keywords.get("state")) is not None:
        given |= flatten("state", normalise(spec, "state", state, {**spec.options.defaults, **keywords}))
    return given


def _apart(call: Prepared, core: Any, residuals: Any, out: Any, state: Any) -> tuple[Any, Any]:
    """The public (out, state), copied where the pullback reads them: the caller may write to them."""
    own = functools.partial(copied, call.library)
    if core.reads_out(residuals):
        out = own(out)
    if state is not None and (call.spec.state.unpack_vjp is not None or core.reads_end(residuals)):
        state = unflatten(state, [own(S) for S in flatten("state", state).values()])
    return out, state


def _add(grads: dict[str, Array], more: Mapping[str, Array]) -> None:
    """grads += more, by name."""
    for name, y in more.items():
        grads[name] = y if name not in grads else grads[name] + y
