"""Templates: a checked call, to which other arrays with its signature are bound without being checked again.

The change of variables is computed for every call: it may depend on the numbers. The kernels of the core are recorded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable
from typing import Any

from ...core import Computation
from ...runtime import shapes
from ...runtime.arrays import Array, is_cupy, is_numpy
from ...runtime.held import held_bytes
from ...runtime.recorder import Recorder
from ...spec import Call
from ..binding import inputs_of, normalise
from ..layouts import LAYOUTS, ONE_TOKEN, before
from ..overwrite import overlaps
from ..results import finished, returned
from . import plans
from .plans import launches_of, without


def _indices(call: Call, names: tuple[str, ...]) -> list[Any]:
    """The indices that add the time axis to the caller's arrays of one token."""
    times = [shapes.time_axis(call.axes[n], getattr(call, n).ndim, call.batch) for n in names]
    return [... if time is None else before(time) for time in times]


class Template:
    """A checked call without its arrays."""

    def __init__(self, key: Hashable, call: Call, names: tuple[str, ...], core: Computation):
        """key: of the plan. names: of the arrays in the order of a signature."""
        self._key, self._is_measured = key, is_cupy(call.xp)
        self._fixed = vars(call.without_arrays())
        self.names = names
        layout = call.options["layout"]
        self._axes = [call.axes[n] for n in names] if layout == "heads_first" else []
        self._indices = _indices(call, names) if layout == ONE_TOKEN else []
        fn, plan, wanted = call.name, call.plan, call.options["backend"]
        self.core = core
        self._forward: Any = lambda x, state: core.forward(fn, x, plan, state, wanted)
        self.backward: Any = core.backward
        overwrites = 1 if plan.overwrite else None
        if is_numpy(call.xp):
            self._forward = RecordedFunction(call.xp, self._forward, overwrites)
            self.backward = RecordedFunction(call.xp, self.backward)
        elif is_cupy(call.xp) and not plan.gradients:
            self._forward = RecordedFunction(call.xp, self._forward, overwrites, 2)

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that it holds."""
        return held_bytes(self) if self._is_measured else 0

    def bind(self, arrays: list[Array], state: Any) -> Call:
        """The call on other arrays."""
        c = Call(**self._fixed)
        spec = c.spec
        if self._indices:
            arrays = [x[index] for x, index in zip(arrays, self._indices, strict=True)]
        elif self._axes:
            enter = LAYOUTS["heads_first"].enter
            arrays = [enter(c.xp, x, axes, c.batch) for x, axes in zip(arrays, self._axes, strict=True)]
        vars(c).update(zip(self.names, arrays, strict=True))
        state = normalise(spec, "state", state, c.options) if isinstance(state, tuple) else state
        c.given_state = c.state = c.initial = state
        if spec.state.pack is not None and c.rows is None:
            c.initial = spec.state.pack(c, state)
        return c

    def forward(self, call: Call) -> Any:
        """(core's output, core's final state, residuals) of a bound call."""
        found = self._forward(inputs_of(call), call.initial)
        if not self._is_measured:  # the first call has recorded the core's kernels
            self._is_measured = True
            if self._key in plans.by_key:
                plans.store(self._key, plans.by_key[self._key])
        return found

    def run(self, arrays: list[Array], state: Any, pointers: Any) -> Any:
        """The plan of a call that is not recorded as a whole: computed without checks."""
        inputs = without(arrays, state)
        call = self.bind(inputs, state)
        if pointers is not None and call.options["overwrite_state"] and overlaps(state, inputs):
            return None  # an error, which the checks raise
        return returned(call, finished(call, *self.forward(call)[:2]))


class RecordedFunction:
    """A function of nested tuples of arrays: recorded by its first call, replayed on arrays of the same layout.

    Its first two results are arrays of their own. What is no array depends on the options of a call, but for numbers.
    """

    def __init__(
        self, xp: Any, function: Callable[..., tuple[Any, ...]], overwrites: int | None = None, count: int | None = None
    ):
        """xp: the library of the arrays. overwrites: which argument, a state, the function may write to.

        count: results that a replay returns, None in the place of others; all by default.
        """
        self._xp, self._function, self._overwrites, self._count = xp, function, overwrites, count
        self._module: Any = None  # of the launches, once there are some
        self._is_known = False
        self._layout: Any = None
        self._sequence: Any = None

    def __call__(self, *arguments: Any) -> Any:
        if not self._is_known:
            self._is_known = True
            return self._recorded(arguments)
        if self._sequence is None:
            return self._function(*arguments)
        given, others = self._arrays_of(arguments)
        layout, pointers = self._module.layout_of(given)
        if (layout, others) != self._layout or (pool := self._sequence.run(given, pointers)) is None:
            return self._function(*arguments)
        rest = self._sequence.held(pool) if self._count is None else (None,)
        return (*self._sequence.get(pool), *rest)

    def _recorded(self, arguments: tuple[Any, ...]) -> Any:
        """The function, computed; its launches are recorded if they are all that computed it."""
        with Recorder() as recorder:
            found = self._function(*arguments)
        if recorder.launches:
            given, others = self._arrays_of(arguments)
            self._module = launches_of(self._xp)
            self._layout = self._module.layout_of(given)[0], others
            rest = found[2:] if self._count is None else ()
            state = None if self._overwrites is None else arguments[self._overwrites]
            with contextlib.suppress(LookupError, MemoryError):  # the function has been computed
                self._sequence = self._module.LaunchSequence(recorder, given, found[:2], state, rest)
        return found

    def _arrays_of(self, arguments: tuple[Any, ...]) -> tuple[list[Array], list[Any]]:
        """(the different arrays, where each of them is and all else)."""
        given, others = list[Array](), list[Any]()
        self._add(arguments, given, others)
        return given, others

    def _add(self, x: Any, given: list[Array], others: list[Any]) -> None:
        """Add the different arrays of nested tuples to `given`; to `others` which each is, and all else."""
        if isinstance(x, self._xp.ndarray):
            at = next((n for n, y in enumerate(given) if y is x), len(given))
            if at == len(given):
                given.append(x)
            others.append(at)
        elif isinstance(x, tuple):
            others.append(len(x))
            for part in x:
                self._add(part, given, others)
        else:
            others.append(x if isinstance(x, float | int) else type(x))
