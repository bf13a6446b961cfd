"""The change of variables of a vjp as recorded array calls: forward, and both transposes.

    to_core        before the core's forward            from_core, unpack     after it
    from_core_vjp  before the core's backward           to_core_vjp           after it

One trace and one memory of results: the transposes read what was computed forward, and a pullback works on a copy, so
that its results are its own. `RecordedChange.spec` has these functions in place of those that were traced.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from ...core import StatesAt
from ...matrix_state.input_steps import joined
from ...ops.cpu.programs import Places, Views, record, whole  # plans are recorded where there are compiled loops
from ...runtime.agreement import agrees
from ...runtime.arrays import Array
from ...runtime.tracing import LONGEST, Trace, Traced, traced_variables
from ...spec import Variables, VariantSpec
from ..binding import Prepared
from ..replay import Template, split
from .states import like_state, state_parts


class Tracer:
    """The functions of a change of variables on traced arrays, in the order of a vjp."""

    def __init__(self, call: Prepared, names: tuple[str, ...]):
        """call: bound, on arrays with the signature. names: of its arrays."""
        self.spec, c = call.spec, call.variables
        parts = state_of(self.spec, c)
        self.given = [*(getattr(c, n) for n in names), *parts]
        self.trace, self.c = traced_variables(c, names, *parts)
        self.c.state = like_state(c.state, self.trace.arrays[len(names) :]) if parts else None
        self._done = 0  # calls that are part of a program

    def program(self, found: list[Any]) -> Views:
        """The array calls since the last program, and its results."""
        calls = record(self.trace, self._done)
        self._done = len(self.trace.calls)
        return Views(calls, Places(self.trace), self.trace, found)

    def inputs(self) -> tuple[Any, dict[int, int], Views]:
        """(the core's inputs but for traced ones, where each of those is among the results, their program).

        One array may be several inputs: cores know what is erased by keys by its being the array of keys.
        """
        x = self.spec.change.to_core(self.c)
        results = {id(y): y for y in x if isinstance(y, Traced)}
        order = list(results)
        fields = {n: order.index(id(y)) for n, y in enumerate(x) if id(y) in results}
        program = self.program([whole(self.trace, y) for y in results.values()])
        return type(x)(*(None if n in fields else y for n, y in enumerate(x))), fields, program

    def output(self, out: Array) -> tuple[Any, Views]:
        """(the core's output, traced, and the program of the public one)."""
        traced = self.trace.added(out)
        return traced, self.program([self.spec.change.from_core(self.c, traced)])  # type: ignore[misc]

    def cotangent(self, out: Any, dout: Array) -> tuple[Any, Any, Views]:
        """(the c of to_core_vjp, gradients by name, the program of the cotangent of the core's output)."""
        d, more = self.spec.change.from_core_vjp(self.c, out, self.trace.added(dout))  # type: ignore[misc]
        c = self.c.extended({n: more.pop(n) for n in [*more] if n not in self.spec.arrays})
        return c, more, self.program([d])

    def gradients(self, c: Any, d: Any, more: dict[str, Array]) -> tuple[list[str], Views]:
        """(names, the program of their gradients), more of which are added."""
        known = {id(y): self.trace.added(y) for y in d if isinstance(y, np.ndarray)}
        grads = self.spec.change.to_core_vjp(c, type(d)(*(known.get(id(y), y) for y in d)))
        for name, y in more.items():
            grads[name] = grads[name] + y if name in grads else y
        names = [n for n, y in grads.items() if y is not None]
        return names, self.program([grads[n] for n in names])

    def state(self, c: Variables, end: Any) -> tuple[Any, Views] | None:
        """(a public final state, its program); None if it is made of views. c: as it is after `inputs`."""
        first = len(self.trace.calls)
        found = self.spec.state.unpack(c, like_state(end, [self.trace.added(y) for y in state_parts(end)]))  # type: ignore[misc]
        return None if len(self.trace.calls) == first else (found, self.program(state_parts(found)))


class RecordedChange:
    """The change of variables of one signature, for cotangents of one layout; others are computed as before.

    The variables of a call get the attribute `recorded`, the arrays given and the memory of results, and those of a
    pullback `pulled`, the arrays of its programs and what `from_core_vjp` was given.
    """

    def __init__(self, call: Prepared, names: tuple[str, ...], computed: Any, backward: Callable[[Array], Any]):
        """computed: the core's (out, final state) of the call. backward(d_out): gradients of the core's inputs."""
        (out, end), spec, t = computed, call.spec, Tracer(call, names)
        self._spec, self._names, self._output, self._layout = spec, names, None, None
        self._inputs, self._fields, self._before = t.inputs()
        c, forward, more, d_out = t.c, Variables(**vars(t.c)), dict[str, Array](), np.ones_like(out)
        if spec.change.from_core is not None:
            traced, self._output = t.output(out)
            self._kept = t.trace.bytes
            v = getattr(call.variables, spec.change.value)
            dout = np.ones((*out.shape[:-1], v.shape[-1]), v.dtype)
            c, more, self._cotangent = t.cotangent(traced, dout)
            self._layout = layout_of([dout])
            d_out = self._cotangent.run([*t.given, t.trace.memory, t.trace.memory, out, dout])[0].copy()
        else:
            self._kept = t.trace.bytes
        d = backward(d_out)
        self._d_fields = [n for n, y in enumerate(d) if isinstance(y, np.ndarray)]
        self._d_layout = layout_of([d[n] for n in self._d_fields])
        self._grad_names, self._gradients = t.gradients(c, d, more)
        self._beside, self._state = len(t.trace.beside), None
        if spec.state.unpack is not None and spec.state.pack_vjp is not None:
            self._state = t.state(forward, end)
        self._words = t.trace.bytes // 8
        self.spec = self._replaced(spec)

    def _replaced(self, spec: VariantSpec) -> VariantSpec:
        """The spec with the recorded functions."""
        change = replace(spec.change, to_core=self.to_core, to_core_vjp=self.to_core_vjp)
        if self._output is not None:
            change = replace(change, from_core=self.from_core, from_core_vjp=self.from_core_vjp)
        state = spec.state if self._state is None else replace(spec.state, unpack=self.unpack)
        return replace(spec, change=change, state=state)

    def to_core(self, c: Variables) -> Any:
        """The core's inputs."""
        given = [*(getattr(c, n) for n in self._names), *state_of(self._spec, c)]
        memory, found = np.empty(self._words), list(self._inputs)
        results = self._before.run([*given, memory])
        for n, at in self._fields.items():
            found[n] = results[at]
        c.recorded = given, memory
        return type(self._inputs)(*found)

    def from_core(self, c: Variables, out: Array) -> Array:
        """The public output."""
        given, memory = c.recorded
        return self._output.run([*given, memory, memory, out])[0].copy()  # type: ignore[union-attr]

    def unpack(self, c: Variables, end: Any) -> Any:
        """The public final state."""
        given, memory = c.recorded
        kind, program = self._state  # type: ignore[misc]
        return like_state(kind, program.run([*given, *[memory] * (2 + self._beside), *state_parts(end)]))

    def from_core_vjp(self, c: Variables, out: Array, dout: Array) -> tuple[Array, dict[str, Any]]:
        """The cotangent of the core's output; gradients by name are part of to_core_vjp."""
        if layout_of([dout]) != self._layout:
            self._spec.change.to_core(c)
            return self._spec.change.from_core_vjp(c, out, dout)  # type: ignore[misc]
        arrays = [*self._own(c), out, dout]
        return self._cotangent.run(arrays)[0], {"pulled": (arrays, out, dout)}

    def to_core_vjp(self, c: Variables, d: Any) -> dict[str, Array]:
        """The gradients by name."""
        pulled, change = getattr(c, "pulled", None), self._spec.change
        each = [d[n] for n in self._d_fields]
        if layout_of(each) == self._d_layout and (pulled is not None or self._output is None):
            arrays = self._own(c) if pulled is None else pulled[0]
            found = self._gradients.run([*arrays, *{id(y): y for y in each}.values()])
            return dict(zip(self._grad_names, found, strict=True))
        change.to_core(c)
        if pulled is None:
            return change.to_core_vjp(c, d)
        _, more = change.from_core_vjp(c, *pulled[1:])  # type: ignore[misc]
        grads = change.to_core_vjp(c.extended({n: more.pop(n) for n in [*more] if n not in self._spec.arrays}), d)
        return {n: grads[n] + more[n] if n in more else grads[n] for n in grads}

    def _own(self, c: Variables) -> list[Array]:
        """The arrays given, and a copy of the results so far: a pullback may be called again."""
        given, memory = c.recorded
        own = np.empty(self._words)
        own[: self._kept // 8] = memory[: self._kept // 8]
        return [*given, own, own]


def improved(template: Template, signature: Any, run: Callable[..., Any]) -> Template:
    """The template with a recorded change of variables, if there is one and it computes the same; else the template.

    run(template, arrays, state, None) makes the results of a call and of its pullback.
    """
    (arrays, state), listed = split(signature), Trace.listed
    if sum(y.nbytes for y in arrays) > LONGEST:
        return template
    try:
        call = template.bind(arrays, state)
        out, end, residuals = template.forward(call)
        if out is None or isinstance(end, StatesAt):
            return template
        core, spec = template.core, call.spec
        changed, residuals = joined(spec.change, residuals)
        call = call._replace(spec=replace(spec, change=changed))
        change = RecordedChange(call, template.names, (out, end), lambda d: core.backward(residuals, d, None)[0])
    except Exception:  # the call can be computed: what a trace does not understand must not be an error
        return template
    found = template.replaced(change.spec, residuals)
    is_used = Trace.listed > listed and agrees(functools.partial(run, found), functools.partial(run, template), arrays,
                                               state)  # fmt: skip
    return found if is_used else template


def state_of(spec: VariantSpec, c: Variables) -> list[Array]:
    """The parts of an initial state that is converted."""
    return state_parts(getattr(c, "state", None)) if spec.state.pack is not None else []


def layout_of(arrays: list[Any]) -> list[Any]:
    """Shapes, strides and dtypes."""
    return [None if y is None else (y.shape, y.strides, y.dtype) for y in arrays]
