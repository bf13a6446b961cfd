"""vjp: the result of a call and its pullback, replayed if both were recorded."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from ..runtime.arrays import Array, is_mutable
from ..runtime.unchanged import check_unchanged, mark
from ..spec import VariantSpec
from . import replay
from .binding import Prepared, prepare
from .dispatch import NO_LIMIT, core_of, limit
from .results import Result, copied, cotangents, finish, gradients
from .states import by_name, flatten, unflatten

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
    signature = None if signature is None or signature.pointers is None else signature  # of CuPy arrays
    if signature is not None:
        from . import device_replay

        if (forward := device_replay.find_forward(signature)) is not None:
            return _replayed(forward, signature, spec, arrays, keywords)
    with limit(spec, keywords):  # num_threads is checked first, as in `run`
        call = prepare(spec, arrays, keywords)
    return _in_full(call, signature, arrays, keywords)


def _replayed(
    forward: Any, signature: replay.Signature, spec: VariantSpec, arrays: tuple[Any, ...], keywords: Mapping[str, Any]
) -> tuple[Any, Pullback]:
    from . import device_replay

    (out, state), recorded = device_replay.replay_forward(forward, signature)

    def pullback(dout: Any = None, dstate: Any = None) -> Any:
        """Gradients by input name, of every array that was given and of the state."""
        found = device_replay.replay_pullback(recorded, (dout, dstate))
        if found is None:  # cotangents of another layout: computed in full, including the forward
            found = _in_full(prepare(spec, arrays, keywords), signature, arrays, keywords)[1](dout, dstate)
        return found

    return Result(out, state) if out is None or keywords.get("return_state") else out, pullback


def _in_full(
    call: Prepared, signature: replay.Signature | None, arrays: tuple[Any, ...], keywords: Mapping[str, Any]
) -> tuple[Any, Pullback]:
    spec = call.spec
    _check_options(call)
    constant_gate = spec.change.gate is not None and getattr(call.variables, spec.change.gate) is None
    plan = call.plan._replace(gradients=True, gate_gradient=not constant_gate)
    with limit(spec, keywords), call.recorder or NO_LIMIT:
        x = call.inputs()
        core = core_of(x)
        core_out, end, residuals = core.forward(spec.name, x, plan, call.state, call.options["backend"])
        result = finish(call, core_out, end)
    shape = None if core_out is None else _out_shape(call, core_out)
    core_out = core_out if spec.change.from_core else None
    recorded = None
    if signature is not None and not call.doubtful_layout:
        from . import device_replay

        saved = residuals, vars(call.variables), core_out
        pair = result if isinstance(result, Result) else (result, None)
        recorded = device_replay.record_forward(signature, call.recorder, pair, saved)
    marks = mark(by_name(spec, arrays, keywords))
    if is_mutable(call.plan.xp):
        result = _apart(call, core, residuals, result)

    def pullback(dout: Any = None, dstate: Any = None) -> Any:
        """Gradients by input name, of every array that was given and of the state."""
        if recorded is not None and (found := device_replay.replay_pullback(recorded, (dout, dstate))) is not None:
            return found
        check_unchanged(spec.name, marks)
        recorder = None if recorded is None else type(call.recorder)()
        d_out, d_state, grads = cotangents(call, dout, dstate, shape, end)
        with limit(spec, keywords), recorder or NO_LIMIT:
            c = call.variables
            if spec.change.from_core_vjp and d_out is not None:
                d_out, more = spec.change.from_core_vjp(c, core_out, d_out)
                c = c.extended({n: more.pop(n) for n in [*more] if n not in spec.arrays})
                _add(grads, more)
            d, dstate0 = core.backward(residuals, d_out, d_state)
            _add(grads, spec.change.to_core_vjp(c, d))
        found = gradients(call, grads, dstate0)
        if recorder is not None:
            device_replay.store_pullback(recorded, (dout, dstate), recorder, found)
        return found

    return result, pullback


def _check_options(call: Prepared) -> None:
    fn = call.spec.name
    if call.options["overwrite_state"]:
        raise ValueError(f"{fn}: overwrite_state=True was given to vjp, expected False: "
                         "the pullback needs the state that would be overwritten")
    if call.options["state_rows"] is not None:
        raise ValueError(f"{fn}: state_rows was given to vjp, expected None: "
                         "take the rows of the pool yourself, as in state=pool[rows]")


def _apart(call: Prepared, core: Any, residuals: Any, result: Any) -> Any:
    """The result, copied where the pullback reads it: the caller may write to it."""
    own = functools.partial(copied, call.library)
    out, state = result if isinstance(result, Result) else (result, None)
    if core.reads_out(residuals):
        out = own(out)
    if state is not None and (call.spec.state.unpack_vjp is not None or core.reads_end(residuals)):
        state = unflatten(state, [own(S) for S in flatten("state", state).values()])
    return Result(out, state) if isinstance(result, Result) else out


def _add(grads: dict[str, Array], more: Mapping[str, Array]) -> None:
    """grads += more, by name."""
    for name, y in more.items():
        grads[name] = y if name not in grads else grads[name] + y


def _out_shape(call: Prepared, core_out: Array) -> tuple[int, ...]:
    """The public shape of out."""
    *batch, T, H = core_out.shape[:-1]
    V = call.variables.sizes.V
    return (*batch, H, T, V) if call.options["layout"] == "heads_first" else (*batch, T, H, V)
