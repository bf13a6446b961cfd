"""Templates: a checked call, to which other arrays with its signature are bound without being checked again.

The change of variables is computed for every call: it may depend on the numbers. The kernels of the core are recorded.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from ...core import Computation
from ...runtime import shapes
from ...runtime.arrays import Array, is_cupy, is_numpy
from ...runtime.held import held_bytes
from ...spec import FIXED, Variables
from ..binding import Prepared, axes_of, normalise
from ..layouts import LAYOUTS, ONE_TOKEN, before
from ..overwrite import overlaps
from ..results import StatesResult, finished
from . import plans
from .plans import without

new = tuple.__new__  # calling a NamedTuple class takes three times as long


def _indices(call: Prepared, names: tuple[str, ...]) -> list[Any]:
    """The indices that add the time axis to the caller's arrays of one token."""
    axes, c = axes_of(call.spec, call.options), call.variables
    times = [shapes.time_axis(axes[n], getattr(c, n).ndim, c.sizes.batch) for n in names]
    return [... if time is None else before(time) for time in times]


class Template:
    """A checked call without its arrays, and without the recorder that has them.

    Other arrays with its signature are bound to it without being checked again.

    The change of variables is computed for every call: it may depend on the numbers.
    """

    nbytes = plans.LEAST

    def __init__(self, key: Hashable, call: Prepared, names: tuple[str, ...], core: Computation):
        """key: of the plan. names: of the arrays in the order of a signature."""
        c, options = call.variables, call.options | {"state": None}
        self._key, self._is_measured = key, is_cupy(c.xp)
        self._fixed = dict.fromkeys(call.spec.arrays) | {n: getattr(c, n) for n in FIXED} | {"options": options}
        self.names = names
        axes = axes_of(call.spec, options)
        self._axes = [axes[n] for n in names] if options["layout"] == "heads_first" else []
        self._indices = _indices(call, names) if options["layout"] == ONE_TOKEN else []
        self._call = call._replace(variables=Variables(), state=None, given_state=None, options=options, recorder=None)
        fn, plan, wanted = call.spec.name, call.plan, options["backend"]
        self.core = core
        self._forward: Any = lambda x, state: core.forward(fn, x, plan, state, wanted)
        self.backward: Any = core.backward
        if is_cupy(c.xp) and not plan.gradients:
            from .device import RecordedLaunches

            self._forward = RecordedLaunches(self._forward, plan.overwrite).forward
        elif is_numpy(c.xp) and call.recorder is not None and call.recorder.launches:
            from .host import RecordedFunction

            self._forward = RecordedFunction(self._forward, 1 if plan.overwrite else None)
            self.backward = RecordedFunction(self.backward)

    def bind(self, arrays: list[Array], state: Any) -> Prepared:
        """The call on other arrays."""
        spec, library, options, _, plan, _, _, rows, recorder = self._call
        c = Variables()
        own = c.__dict__
        own.update(self._fixed)
        if self._indices:
            arrays = [x[index] for x, index in zip(arrays, self._indices, strict=True)]
        elif self._axes:
            enter = LAYOUTS["heads_first"].enter
            arrays = [enter(c.xp, x, axes, c.sizes.batch) for x, axes in zip(arrays, self._axes, strict=True)]
        own.update(zip(self.names, arrays, strict=True))
        state = core_state = normalise(spec, "state", state, options) if isinstance(state, tuple) else state
        if spec.state.pack is not None and rows is None:
            c.state = state
            core_state = spec.state.pack(c, state)
        return new(Prepared, (spec, library, options, c, plan, core_state, state, rows, recorder))

    def forward(self, call: Prepared) -> Any:
        """(core's output, core's final state, residuals) of a bound call."""
        found = self._forward(call.inputs(), call.state)
        if not self._is_measured:  # the first call has recorded the core's kernels
            self._is_measured, self.nbytes = True, plans.LEAST + held_bytes(self)
            if self._key in plans.by_key:
                plans.store(self._key, plans.by_key[self._key])
        return found

    def run(self, arrays: list[Array], state: Any, pointers: Any) -> tuple[Any, Any] | None:
        """The plan of a call that is not recorded as a whole: computed without checks."""
        inputs = without(arrays, state)
        call = self.bind(inputs, state)
        if pointers is not None and call.options["overwrite_state"] and overlaps(state, inputs):
            return None  # an error, which the checks raise
        found = finished(call, *self.forward(call)[:2])
        return (found, None) if isinstance(found, StatesResult) else found
