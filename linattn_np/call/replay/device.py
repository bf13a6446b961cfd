"""Recorded plans of calls on CuPy arrays: kernel launches on new pointers, and views for the results."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from ...runtime.config import config
from ...runtime.cuda import launch
from ...runtime.cuda.places import place_results, places, positions
from ...runtime.cuda.record import LaunchSequence, get
from ...runtime.memory import is_on_device
from ...runtime.recorder import Recorder
from ...spec import VariantSpec
from ..options import PLAIN, is_plain_tuple

Array = Any
new = tuple.__new__  # calling a NamedTuple class takes three times as long
MOST_DISJOINT = 64  # sets of pointers of calls whose state shares no memory with the inputs


def signature_maker(kind: Any) -> Callable[..., Any]:
    """signature(spec, arrays, keywords) of calls on CuPy arrays, which are of type `kind`; None for other arguments.

    A dense array has the strides of its shape. That is asked of an attribute that CuPy does not document: its public
    ways take 3 and 6 times as long (0.12 and 0.21 us against 0.04 on an H200's host, 2026-11-22), for six arrays 4 % of
    a step of decoding.
    """
    current_device = launch.device_function()

    def signature(spec: VariantSpec, arrays: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
        if "cu_seqlens" in keywords and keywords["cu_seqlens"] is not None:
            return None
        if type(keywords.get("return_states_at")) is kind:
            return None
        device, low = current_device(), 0
        parts: list[Any] = [spec.name, device, config.values, len(arrays), *keywords]
        pointers: list[int] = []
        given: list[Array] = []
        values, state = (*arrays, *keywords.values()), keywords.get("state")
        several = state if isinstance(state, tuple) else None
        if several is not None:
            if set(map(type, several)) != {kind}:
                return None
            parts.append(len(several))
            values = (*values, *several)
        for x in values:
            if type(x) is kind:
                data = x.data
                if data.device_id != device:
                    return None
                pointer = data.ptr
                low |= pointer
                parts += x.shape, x._c_contiguous or x.strides, x.dtype
                pointers.append(pointer)
                given.append(x)
            elif x is None:
                parts.append(None)
            elif type(x) in PLAIN:
                parts += type(x), x
            elif x is several:
                continue  # its arrays come last
            elif is_plain_tuple(x) and x is not keywords.get("state_rows"):
                parts += tuple(map(type, x)), x
            elif isinstance(x, list) and id(x) == id(keywords.get("return_states_at")) and is_plain_tuple(tuple(x)):
                parts += list, tuple(map(type, x)), tuple(x)
            else:
                return None
        if low & 15:
            parts += [pointer & 15 for pointer in pointers]
        return tuple(parts), given, state, pointers

    return signature


# plain calls


class Plan:
    """A recorded call: returns (out, state) for other arrays with its signature.

    own_state: the final state is the caller's own array, the one given as `state`.
    """

    def __init__(self, recorder: Recorder, given: list[Array], state: Any, results: tuple[Any, Any], own_state: bool):
        """state: the initial one. results: the public (out, state).   Raises LookupError if it cannot be replayed."""
        self.sequence, self._own_state = LaunchSequence(recorder, given), own_state
        self._launches: Callable[[list[int]], Any] = self.sequence.run
        self._spans = [_span(x) for x in given] if own_state else []
        own = state if isinstance(state, tuple) else (state,)
        self._at = [n for n, x in enumerate(given) if any(x is S for S in own)]
        self._disjoint: set[tuple[int, ...]] = set()  # pointers of calls whose state shares no memory with the inputs
        each = [positions(x, recorder.allocated) for x in (results[0], None if own_state else results[1])]
        self._out, self._end = place_results(each, self.sequence, 0)

    def run(self, arrays: None, state: Any, pointers: list[int]) -> tuple[Any, Any] | None:
        """(out, state); None if the call must be computed in full."""
        if self._own_state and (key := tuple(pointers)) not in self._disjoint:
            if self._overlaps(pointers):
                return None  # computed in full: checking the arguments raises the error
            if len(self._disjoint) < MOST_DISJOINT:
                self._disjoint.add(key)
        allocated = self._launches(pointers)
        out, end = self._out, self._end
        if type(out) is int:
            out = allocated[out]
        elif out is not None:
            out = get(out, allocated)
        if self._own_state:
            return out, state
        if type(end) is int:
            return out, allocated[end]
        return out, None if end is None else get(end, allocated)

    def results(self) -> set[int]:
        """Which of the allocated arrays (out, state) are views of."""
        return places(self._out) | places(self._end)

    def by(self, launches: Callable[[list[int]], Any]) -> Plan:
        """The plan with allocations and launches by `launches`: (pointers) -> allocated arrays, those of `results`."""
        plan = copy.copy(self)
        plan._launches = launches
        return plan

    def _overlaps(self, pointers: list[int]) -> bool:
        """Whether the state that is overwritten may share memory with another array."""
        for at in self._at:
            low, high = self._spans[at]
            begin, end = pointers[at] + low, pointers[at] + high
            for n, (pointer, (low, high)) in enumerate(zip(pointers, self._spans, strict=True)):
                if pointer + low < end and begin < pointer + high and n != at:
                    return True
        return False


def _span(x: Array) -> tuple[int, int]:
    """Offsets from the address of an array to its first byte and to the end of its last."""
    spans = [stride * (n - 1) for stride, n in zip(x.strides, x.shape, strict=True)]
    return sum(s for s in spans if s < 0), sum(s for s in spans if s > 0) + x.itemsize


class StatesPlan:
    """A recorded call with states at positions: returns (the public result, None)."""

    def __init__(self, recorder: Recorder, given: list[Array], results: tuple[Any, ...]):
        """results: the public (out, state, states).   Raises LookupError if it cannot be replayed."""
        self.sequence, self._kind = LaunchSequence(recorder, given), type(results)
        self._launches: Callable[[list[int]], Any] = self.sequence.run
        self._places = place_results([positions(x, recorder.allocated) for x in results], self.sequence, 0)

    def run(self, arrays: None, state: Any, pointers: list[int]) -> tuple[Any, None]:
        """(the public result, None)."""
        allocated = self._launches(pointers)
        return new(self._kind, [allocated[n] if type(n) is int else get(n, allocated) for n in self._places]), None

    def results(self) -> set[int]:
        """Which of the allocated arrays the result has views of."""
        return {n for x in self._places for n in places(x)}

    def by(self, launches: Callable[[list[int]], Any]) -> StatesPlan:
        """As `Plan.by`."""
        plan = copy.copy(self)
        plan._launches = launches
        return plan


class RecordedLaunches:
    """The launches of a core's forward, for calls whose change of variables is computed by array calls.

    Recorded by the first call; replayed on inputs of the same layout.
    """

    def __init__(self, forward: Callable[[Any, Any], tuple[Any, Any, Any]], overwrite: bool):
        """forward: (inputs, state) -> (out, final state, residuals)."""
        self._forward, self._overwrite = forward, overwrite
        self._layout: Any = None
        self._plan: Plan | None = None

    def forward(self, x: Any, state: Any) -> tuple[Any, Any, Any]:
        """(out, final state, residuals: none in a replay)."""
        every = [*x, *(state if isinstance(state, tuple) else (state,))]
        if not all(y is None or is_on_device(y) for y in every):
            return self._forward(x, state)
        given, layout = _unique(every)
        if layout == self._layout and self._plan is not None:
            found = self._plan.run(None, state, [y.data.ptr for y in given])
            if found is not None:
                return *found, None
        if self._layout is not None:
            return self._forward(x, state)
        with Recorder() as recorder:
            out, end, saved = self._forward(x, state)
        self._layout = layout
        if recorder.launches and self._overwrite == (end is state):
            with contextlib.suppress(LookupError):  # it also copied or computed by other means
                self._plan = Plan(recorder, given, state, (out, end), end is state)
        return out, end, saved


def _unique(arrays: list[Array]) -> tuple[list[Array], list[Any]]:
    """(the different arrays, the layout of all of them)."""
    given: list[Array] = []
    layout: list[Any] = [launch.device_function()()]
    for x in arrays:
        if x is None:
            layout.append(None)
            continue
        at = next((n for n, y in enumerate(given) if y is x), len(given))
        if at == len(given):
            given.append(x)
        data = x.data
        layout += at, x.shape, x._c_contiguous or x.strides, x.dtype, data.ptr & 15, data.device_id
    return given, layout


# forward and pullback


class Pullback(NamedTuple):
    """A recorded pullback: its launches, the type of its gradients and where each is found."""

    sequence: LaunchSequence
    kind: type
    gradients: tuple[Any, ...]


class Forward:
    """A recorded forward of vjp, and its recorded pullbacks by the layout of their cotangents.

    A pullback that cannot be replayed is stored as None; its forward is then not replayed either, since it would run
    twice.
    """

    otherwise = None  # no template: the call is computed in full

    def __init__(
        self, key: Hashable, recorder: Recorder, given: list[Array], results: tuple[Any, ...], residuals: list[Array]
    ):
        """results: the public (out, state), or with states at positions. residuals: arrays that the pullback may read.

        Raises LookupError if the call cannot be replayed.
        """
        pool = [*given, *recorder.allocated]
        at = {x.data.ptr: n for n, x in enumerate(pool)}
        found = [positions(x, pool) for x in results]
        read = dict.fromkeys(n for x in residuals if (n := at.get(x.data.ptr)) is not None and n >= len(given))
        self.residuals = tuple(read)  # their positions in the pool
        self.key = key
        self.sequence, self.kind = LaunchSequence(recorder, given), type(given[0])
        self._count, self._returned = len(given), set[int]()
        self.results: tuple[Any, ...] = self._keep(found)
        self.pullbacks: dict[Hashable, Pullback | None] = {}

    def _keep(self, results: Sequence[Any]) -> tuple[Any, ...]:
        held = {n - self._count for n in self.residuals}
        return place_results([*results, *self._returned], self.sequence, self._count, held)[: len(results)]

    def returns(self, n: int) -> None:
        """A gradient is what forward stored as its n-th residual, which becomes an array."""
        self._returned.add(self.residuals[n])
        self._keep(self.results)

    @property
    def replayable(self) -> bool:
        """Whether there are recorded pullbacks, and all so far were recorded."""
        return bool(self.pullbacks) and None not in self.pullbacks.values()

    def __call__(self, given: list[Array], pointers: list[int]) -> tuple[tuple[Any, ...], Residuals]:
        """(the public results, the residuals of the pullback); given, pointers: of a signature."""
        count, pool = len(given), given + self.sequence.run(pointers)  # pointers has those of the pool now
        read = self.residuals
        results = tuple(pool[n] if type(n) is int else get(n, pool) for n in self.results)
        held = given + [pool[n] for n in read]
        return results, new(Residuals, (self, held, pointers[:count] + [pointers[n] for n in read]))


class Residuals(NamedTuple):
    """A recorded forward, and what its pullback may read of one call: arrays, or their memory, with their pointers."""

    forward: Forward
    arrays: list[Array]
    pointers: list[int]

    def pullback(self, cotangents: tuple[Any, ...]) -> Any:
        """The gradients by a recorded pullback; None if there is none for these cotangents."""
        forward, arrays, pointers = self
        if not forward.pullbacks:
            return None
        layout, given, more = _layout(cotangents, forward.kind)
        if (found := forward.pullbacks.get(layout)) is None:
            return None
        pool = [*arrays, *given]
        pool += found[0].run([*pointers, *more])
        return new(found[1], [pool[n] if type(n) is int else get(n, pool) for n in found[2]])

    def add_pullback(self, cotangents: tuple[Any, ...], recorder: Recorder, gradients: Any) -> bool:
        """Record the plan of a pullback, or that it cannot be replayed; whether there was something to record."""
        forward = self.forward
        layout, given, _ = _layout(cotangents, forward.kind)
        if layout is None or layout in forward.pullbacks:
            return False
        given = [*self.arrays, *given]
        if len({x.data.ptr for x in given}) < len(given):  # one array given twice: the plan does not apply to two
            return False
        try:
            pool = [*given, *recorder.allocated]
            sequence = LaunchSequence(recorder, given)
            found = place_results([positions(x, pool) for x in gradients], sequence, len(given), few=True)
            first = len(self.arrays) - len(forward.residuals)
            for n in {n for x in found for n in places(x) if first <= n < len(self.arrays)}:
                forward.returns(n - first)
            forward.pullbacks[layout] = Pullback(sequence, type(gradients), found)
        except LookupError:
            forward.pullbacks[layout] = None
        return True


def recorded_forward(
    key: Hashable, forward: Forward | None, given: list[Array], recorder: Recorder, results: tuple[Any, ...],
    residuals: Any,
) -> Residuals | None:  # fmt: skip
    """What a pullback may read of a call, with the forward under `key` or a new one; None if it cannot be replayed."""
    if forward is None:
        try:
            forward = Forward(key, recorder, given, results, arrays_of(residuals))
        except LookupError:  # the call also copied or computed by other means
            return None
    if None in forward.pullbacks.values():
        return None
    pool = [*given, *recorder.allocated]
    held = given + [pool[n] for n in forward.residuals]
    return Residuals(forward, held, [x.data.ptr for x in held])


def _layout(cotangents: tuple[Any, ...], kind: Any) -> tuple[Hashable | None, list[Array], list[int]]:
    """(the key of a pullback, its cotangents and those of the parts of a state, their pointers).

    The key is None unless all cotangents are CuPy arrays, of type `kind`, or None.
    """
    key: list[Any] = [launch.device_function()()]
    given, pointers = list[Array](), list[int]()
    if any(isinstance(x, tuple) for x in cotangents):
        cotangents = tuple(y for x in cotangents for y in (x if isinstance(x, tuple) else (x,)))
    for x in cotangents:
        if x is None:
            key.append(None)
        elif type(x) is kind:
            data = x.data
            pointer = data.ptr
            key += x.shape, x._c_contiguous or x.strides, x.dtype, pointer & 15, data.device_id
            given.append(x)
            pointers.append(pointer)
        else:
            return None, given, pointers
    return tuple(key), given, pointers


def arrays_of(x: Any) -> list[Array]:
    """The CuPy arrays among nested tuples, lists and dicts."""
    if isinstance(x, dict):
        x = tuple(x.values())
    if isinstance(x, tuple | list):
        return [y for part in x for y in arrays_of(part)]
    return [x] if is_on_device(x) else []
