"""Recorded plans of a vjp: its forward, and a pullback for each layout of cotangents."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ...core import Computation
from ...runtime.arrays import is_cupy
from ...runtime.pieces.memory import first_byte
from ...runtime.recorder import Recorder
from ...spec import Call
from ..foreign import leaves, mapped
from . import plans
from .plans import Signature, launches_of, names_of, vjp_key
from .template import Template

Array = Any
new = tuple.__new__  # calling a NamedTuple class takes three times as long


class Forward:
    """A recorded forward of vjp, and its recorded pullbacks by the layout of their cotangents.

    A pullback that cannot be replayed is stored as None; its forward is then not replayed either, since it would run
    twice: a NumPy call records its template in the place of the forward, and a piece takes `otherwise`.
    """

    def __init__(
        self, module: Any, key: Hashable, recorder: Recorder, given: list[Array], results: Any, residuals: Any,
        otherwise: Any = None, names: tuple[str, ...] | None = None,
    ):  # fmt: skip
        """module: of the launches. results: the public ones. residuals: has all arrays that a pullback may read.

        otherwise: the plan of a piece's vjp (nn/) where a pullback cannot be replayed.
        names: of the arrays that a template is bound to, in its order.

        Raises LookupError if the call cannot be replayed.
        """
        self.module, self.key, self.otherwise, self.names = module, key, otherwise, names
        self.kind, self.constants = type(given[0]), [*recorder.constants]
        held = module.owners(residuals, recorder)
        self.layouts = [(tuple(y.shape), y.dtype) for y in held]
        self.sequence = module.LaunchSequence(recorder, given, results, held=tuple(held))
        public = module.owners(results, recorder)
        self.returned = {n for n, y in enumerate(held, len(given)) if any(x is y for x in public)}  # of residuals
        self.copies = False  # a pullback reads a result, which the caller may write to
        self.pullbacks: dict[Hashable, Any] = {}
        self.checks: list[Any] = []  # of a layer: functions of its arrays, whether the plan applies (nn/replays.py)

    @property
    def replayable(self) -> bool:
        """Whether there are recorded pullbacks, and all so far were recorded."""
        return bool(self.pullbacks) and None not in self.pullbacks.values()

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that it holds."""
        each = [self.sequence, *filter(None, self.pullbacks.values())]
        return sum(plans.LEAST + getattr(one, "nbytes", 0) for one in each)

    def __call__(self, given: list[Array], pointers: Any) -> tuple[Any, Residuals] | None:
        """(the public result, the residuals of the pullback); None if the call must be computed in full."""
        sequence, count = self.sequence, len(given)
        if (pool := sequence.run(given, pointers)) is None:
            return None
        if pointers is not None:  # of the pool now
            pointers = pointers[:count] + [pointers[n] for n in sequence.places_held]
        results = sequence.get(pool)
        if self.copies:
            results = mapped(lambda x: None if x is None else np.array(x), results)
        return results, new(Residuals, (self, [*given, *sequence.held(pool)], pointers))


class Residuals(NamedTuple):
    """A recorded forward, and what its pullback may read of one call: arrays, or their memory, with their pointers."""

    forward: Forward
    arrays: list[Array]
    pointers: list[int] | None  # None on NumPy

    def pullback(self, cotangents: tuple[Any, ...]) -> Any:
        """The gradients by a recorded pullback; None if there is none for these cotangents."""
        forward, arrays, pointers = self
        if not forward.pullbacks:
            return None
        layout, given, more = layout_of(forward, cotangents)
        if (found := forward.pullbacks.get(layout)) is None:
            return None
        return found([*arrays, *given], None, None if pointers is None else [*pointers, *more])

    def apart(self, cotangents: tuple[Any, ...]) -> tuple[Any, ...]:
        """Cotangents to be recorded: a copy of each that the pullback reads as a residual, as out of a square loss."""
        layout, given, more = layout_of(self.forward, cotangents)
        if layout is None or layout in self.forward.pullbacks:
            return cotangents
        held, places = self.pointers, more
        if held is None:  # NumPy: out may be a view of a residual
            held, places = ([first_byte(x) if x.size else 0 for x in arrays] for arrays in (self.arrays, given))
        shared = {id(x) for x, place in zip(given, places, strict=True) if place in held}

        return mapped(lambda x: x.copy() if id(x) in shared else x, cotangents) if shared else cotangents

    def add_pullback(self, cotangents: tuple[Any, ...], recorder: Recorder, gradients: Any) -> bool:
        """Record the plan of a pullback, or that it cannot be replayed; whether there was something to record."""
        forward, arrays, pointers = self
        layout, given, more = layout_of(forward, cotangents)
        if layout is None or layout in forward.pullbacks:
            return False
        places = [*map(id, (*arrays, *given))] if pointers is None else [*pointers, *more]
        if len(set(places)) < len(places):  # one array given twice: the plan does not apply to two
            return False
        try:
            forward.pullbacks[layout] = self._recorded(given, recorder, gradients)
        except LookupError:
            forward.pullbacks[layout] = None
        return True

    def _recorded(self, given: list[Array], recorder: Recorder, gradients: Any) -> Any:
        """The plan of a pullback.   Raises LookupError if it cannot be replayed."""
        forward, arrays, pointers = self
        recorder.constants += forward.constants
        found = forward.module.LaunchSequence(recorder, [*arrays, *given], gradients, backward=True)
        if pointers is None:
            forward.copies = forward.copies or bool(found.read & forward.returned)
            return found
        first = len(arrays) - len(forward.sequence.places_held)
        for n in found.results_among(range(first, len(arrays))):
            forward.sequence.give(n - first)
        return found


def layout_of(forward: Forward, cotangents: tuple[Any, ...]) -> tuple[Hashable | None, list[Array], list[int]]:
    """(the key of a pullback, its cotangents and those of the parts of a state, their pointers).

    The key is None unless all cotangents are None or arrays of the library of the call.
    """
    has_parts = any(isinstance(x, tuple) for x in cotangents)
    each = leaves(cotangents) if has_parts else cotangents
    parts = tuple([len(x) if isinstance(x, tuple) else None for x in cotangents]) if has_parts else ()
    given = [x for x in each if x is not None]
    if any(type(x) is not forward.kind for x in given):
        return None, [], []
    layout, pointers = forward.module.layout_of(given)
    return (parts, tuple([x is None for x in each]), layout), given, pointers


def record_forward(
    call: Call, signature: Signature, arrays: tuple[Any, ...], keywords: Mapping[str, Any], core: Computation,
    results: Any, residuals: Any,
) -> Residuals | None:  # fmt: skip
    """Record the forward of a vjp: returns what its pullback is recorded with, or None for a template.

    results: the public ones. residuals: everything that the pullback may read.
    """
    if not plans.ENABLED:
        return None
    found, names, key = None, names_of(call.spec, signature, arrays, keywords), vjp_key(signature)
    on_device = is_cupy(call.xp)
    if call.recorder is not None and call.recorder.launches and (on_device or names is not None):
        with contextlib.suppress(LookupError):
            module, own = launches_of(call.xp), None if on_device else names
            found = residuals_of(module, key, call.recorder, signature, results, residuals, names=own)
    if found is None and not (on_device and call.plan.states_at is not None):
        record_template(key, call, names, core)
    return found


def record_pullback(
    recorded: Residuals, call: Call, core: Computation, cotangents: tuple[Any, ...], recorder: Recorder, grads: Any
) -> None:
    """Record the plan of a pullback with its forward; the template of the call if it cannot be replayed."""
    forward = recorded.forward
    if not recorded.add_pullback(cotangents, recorder, grads):
        return
    plans.store(forward.key, forward)
    if not forward.replayable and forward.names is not None:
        plans.store(forward.key, Template(forward.key, call, forward.names, core))


def record_template(key: Hashable, call: Call, names: tuple[str, ...] | None, core: Computation) -> None:
    """Record a template, if arrays can be bound to it and there is no other plan."""
    if names is not None and key not in plans.by_key:
        plans.store(key, Template(key, call, names, core))


def residuals_of(
    module: Any, key: Hashable, recorder: Any, signature: Signature, results: Any, residuals: Any,
    otherwise: Any = None, names: tuple[str, ...] | None = None,
) -> Residuals | None:  # fmt: skip
    """The residuals of a computed forward, with which its pullback is recorded; None if it cannot be.

    Arguments as those of Forward.   Raises LookupError if the forward cannot be replayed.
    """
    (_, given, _, pointers), forward = signature, plans.by_key.get(key)
    if forward is None:
        forward = Forward(module, key, recorder, given, results, residuals, otherwise, names)
    if type(forward) is not Forward or None in forward.pullbacks.values():
        return None
    held = module.owners(residuals, recorder)
    if [(tuple(y.shape), y.dtype) for y in held] != forward.layouts:
        return None  # a first call of the process may compute otherwise
    held = [*given, *held]
    return Residuals(forward, held, None if pointers is None else module.layout_of(held)[1])
