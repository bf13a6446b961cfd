"""Recorded plans of calls on NumPy arrays: the kernels of a call on other addresses, and views for the results."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...runtime.held import held_bytes
from ...runtime.memory import is_next_column
from ...runtime.pieces.record import LaunchSequence, View, view_of
from ...runtime.recorder import Recorder
from ...spec import Variables
from .plans import LEAST

Array = np.ndarray
new = tuple.__new__  # calling a NamedTuple class takes three times as long


class Fixed(NamedTuple):
    """What does not differ between calls: constants, and all that the options of a call determine."""

    value: Any


def position(x: Any, pool: list[Array], constants: Sequence[Array] = ()) -> Any:
    """How `get` finds x, nested tuples of arrays, in a pool.   Raises LookupError for an array that NumPy computed."""
    if isinstance(x, np.ndarray):
        return Fixed(x) if any(np.may_share_memory(x, y) for y in constants) else view_of(x, pool)
    if isinstance(x, dict | list | Variables):
        raise LookupError(f"the core keeps a {type(x).__name__} for its backward")
    if not isinstance(x, tuple):
        return None if x is None else Fixed(x)
    parts = tuple([position(part, pool, constants) for part in x])
    is_fixed = all(part is None or type(part) is Fixed for part in parts)
    return Fixed(x) if is_fixed else (type(x), parts)


def get(found: Any, pool: list[Array]) -> Any:
    """What `position` described, from another pool."""
    kind = type(found)
    if kind is int:
        return pool[found]
    if kind is View:
        return found(pool)
    if found is None:
        return None
    if kind is Fixed:
        return found.value
    kind, parts = found
    return new(kind, [get(part, pool) for part in parts])


def indices(found: Any) -> set[int]:
    """The arrays of a pool that a position refers to."""
    if found is None or type(found) is Fixed:
        return set()
    if isinstance(found, View):
        return {found.of}
    return {found} if type(found) is int else {n for part in found[1] for n in indices(part)}


def made_of(found: Any, recorder: Recorder) -> list[Array]:
    """The allocated arrays in whose memory results lie."""
    arrays = list[Array]()
    _add(found, arrays, [])
    return [y for y in recorder.allocated if any(np.may_share_memory(x, y) for x in arrays)]


def written_of(given: list[Array], state: Any) -> tuple[list[int], list[int]]:
    """The indices of given arrays that are the parts of a state, and of those that are columns of its first one."""
    parts = state if isinstance(state, tuple | list) else (state,)
    written = [n for n, x in enumerate(given) if any(x is S for S in parts)]
    joined = len(written) > 1 and is_next_column(given[written[0]], given[written[1]])
    return (written[:1] + written[2:], written[1:2]) if joined else (written, [])


def check_own(results: tuple[Any, ...], given: list[Array], written: Sequence[list[int]]) -> None:
    """Raise LookupError for a result in memory of an array that is given, unless that is overwritten."""
    own = {n for found in results for n in indices(found)}
    if own & {*range(len(given))} - {n for part in written for n in part}:
        raise LookupError("a result lies in an array that is given")


class Plan:
    """A recorded call."""

    def __init__(self, recorder: Recorder, given: list[Array], results: tuple[Any, Any], overwritten: Any):
        """results: the public (out, state), or a result with states at positions and None. overwritten: a state.

        Raises LookupError if the call cannot be replayed.
        """
        written, made = written_of(given, overwritten), made_of(results, recorder)
        self.sequence, pool = LaunchSequence(recorder, given, written[0], written[1], made), [*given, *made]
        self._out, self._end = (position(x, pool) for x in results)
        check_own((self._out, self._end), given, written)
        self.nbytes = LEAST + held_bytes(self.sequence)

    def run(self, arrays: list[Array], state: Any, pointers: None = None) -> tuple[Any, Any] | None:
        """The results; None if the call must be computed in full."""
        if (pool := self.sequence.run(arrays)) is None:
            return None
        out = self._out
        return pool[out] if type(out) is int else get(out, pool), get(self._end, pool)


class RecordedFunction:
    """A function of nested tuples of arrays: recorded by its first call, replayed on arrays of the same layout.

    Its first two results are arrays of their own. What is no array depends on the options of a call, but for numbers.
    """

    def __init__(self, function: Callable[..., tuple[Any, ...]], overwrites: int | None = None):
        """overwrites: the index of the argument, a state, that the function may write to."""
        self._function, self._overwrites = function, overwrites
        self._layout: Any = None
        self._sequence: Any = None
        self._results: Any = None

    def __call__(self, *arguments: Any) -> Any:
        if self._layout is not None and self._sequence is None:
            return self._function(*arguments)
        given, layout = list[Array](), list[Any]()
        _add(arguments, given, layout)
        if layout == self._layout:
            pool = self._sequence.run(given)
            return self._function(*arguments) if pool is None else get(self._results, pool)
        if self._layout is not None:
            return self._function(*arguments)
        self._layout = layout
        with Recorder() as recorder:
            found = self._function(*arguments)
        with contextlib.suppress(LookupError, MemoryError):  # the function has been computed
            self._record(recorder, given, arguments, found)
        return found

    def _record(self, recorder: Recorder, given: list[Array], arguments: Any, found: tuple[Any, ...]) -> None:
        written = ([], []) if self._overwrites is None else written_of(given, arguments[self._overwrites])
        made = made_of(found, recorder)
        sequence = LaunchSequence(recorder, given, written[0], written[1], made)
        results = position(found, [*given, *made], recorder.constants)
        check_own(results[1][:2], given, written)
        self._sequence, self._results = sequence, results


def _add(x: Any, given: list[Array], layout: list[Any]) -> None:
    """Add the different arrays of nested tuples to `given`, and how they lie to `layout`."""
    if isinstance(x, np.ndarray):
        at = next((n for n, y in enumerate(given) if y is x), len(given))
        if at == len(given):
            given.append(x)
        layout += at, x.shape, x.strides, x.dtype
    elif isinstance(x, tuple):
        layout.append(len(x))
        for part in x:
            _add(part, given, layout)
    else:
        layout.append(x if isinstance(x, float | int) else type(x))


class Pullback(NamedTuple):
    """A recorded pullback: its kernels, and where its gradients are in the pool of forward, cotangents and its own."""

    sequence: LaunchSequence
    gradients: Any


class Forward:
    """A recorded forward of vjp, and its recorded pullbacks by the layout of their cotangents.

    A pullback that cannot be replayed is stored as None; then calls take `otherwise`.
    """

    def __init__(self, key: Hashable, recorder: Recorder, given: list[Array], results: Any, otherwise: Any):
        """results: the public ones. otherwise: the Template of the call.   Raises LookupError without a plan."""
        self.key, self.otherwise = key, otherwise
        self.sequence, pool = LaunchSequence(recorder, given), [*given, *recorder.allocated]
        self.results, self._read, self._constants = position(results, pool), set[int](), recorder.constants
        self.pullbacks: dict[Hashable, Pullback | None] = {}
        self.nbytes = LEAST + held_bytes(self.sequence)

    @property
    def replayable(self) -> bool:
        """Whether there are recorded pullbacks, and all so far were recorded."""
        return bool(self.pullbacks) and None not in self.pullbacks.values()

    def __call__(self, given: list[Array], pointers: None) -> tuple[Any, Residuals] | None:
        """(the public results, the residuals of the pullback); None if the call must be computed in full."""
        if (pool := self.sequence.run(given)) is None:
            return None
        read, count = self._read, len(given)
        held = [x if n < count or n in read else None for n, x in enumerate(pool)]
        return get(self.results, pool), Residuals(self, held)

    def add_pullback(self, layout: Hashable, given: list[Array], recorder: Recorder, gradients: Any) -> None:
        """Record a pullback; given: the pool of its forward, and its cotangents."""
        recorder.constants += self._constants
        try:
            sequence, pool = LaunchSequence(recorder, given), [*given, *recorder.allocated]
            found = position(gradients, pool)
            if sequence.read & indices(self.results):
                raise LookupError("the pullback reads a result, which the caller may write to")
            if indices(found) & set(range(len(given))):
                raise LookupError("a gradient lies in an array of the forward")
            self._read |= sequence.read
            self.pullbacks[layout] = Pullback(sequence, found)
            self.nbytes += LEAST + held_bytes(sequence)
        except LookupError:
            self.pullbacks[layout] = None


class Residuals(NamedTuple):
    """A recorded forward, and the arrays of one call that its pullbacks read; None: one that none read so far."""

    forward: Forward
    arrays: list[Any]

    def pullback(self, cotangents: tuple[Any, ...]) -> Any:
        """The gradients by a recorded pullback; None if there is none for these cotangents."""
        layout, given = _layout(cotangents)
        if (found := self.forward.pullbacks.get(layout)) is None:
            return None
        own, other = self.arrays, self.arrays[0]  # any array in the place of one that is not read
        if any(n < len(own) and own[n] is None for n in found.sequence.read):  # recorded after this call
            return None
        pool = found.sequence.run([*[other if x is None else x for x in own], *given])
        return None if pool is None else get(found.gradients, pool)

    def add_pullback(self, cotangents: tuple[Any, ...], recorder: Recorder, gradients: Any) -> bool:
        """Record the plan of a pullback, or that it cannot be replayed; whether there was something to record."""
        layout, given = _layout(cotangents)
        if layout is None or layout in self.forward.pullbacks:
            return False
        if any(x is y for x in given for y in self.arrays):  # one array given twice: the plan does not apply to two
            return False
        self.forward.add_pullback(layout, [*self.arrays, *given], recorder, gradients)  # of a call in full: it has all
        return True


def _layout(cotangents: tuple[Any, ...]) -> tuple[Hashable | None, list[Array]]:
    """(the key of a pullback, its cotangents and those of the parts of a state); no key unless all are NumPy arrays."""
    each = [y for x in cotangents for y in (x if isinstance(x, tuple) else (x,))]
    if not all(y is None or type(y) is np.ndarray for y in each):
        return None, []
    return tuple(None if y is None else (y.shape, y.strides, y.dtype) for y in each), [y for y in each if y is not None]
