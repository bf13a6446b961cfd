"""Recorded plans of calls on CuPy arrays: kernel launches on new pointers, and views for the results."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

from ..matrix_state import policy
from ..runtime.cuda import launch
from ..runtime.cuda.record import LaunchSequence, Recorder, View, get, view_of
from ..runtime.memory import is_on_device
from ..spec import VariantSpec
from . import replay
from .replay import PLAIN, Signature, new

Array = Any
MOST_APART = 64  # sets of pointers that are known to lie apart


class Plan:
    """A recorded call: returns (out, state) for other arrays with its signature.

    own_state: the final state is the caller's own array, the one given as `state`.
    """

    def __init__(self, recorder: Recorder, signature: Signature, out: Any, state: Any, own_state: bool):
        """Raises LookupError if the call cannot be replayed."""
        self._launches = LaunchSequence(recorder, signature.arrays)
        self._own_state = own_state
        self._spans = [_span(x) for x in signature.arrays] if own_state else []
        self._at: Any = next((n for n, x in enumerate(signature.arrays) if x is signature.state), None)
        self._apart: set[tuple[int, ...]] = set()  # pointers of calls whose state lies apart from the inputs
        allocated = recorder.allocated
        self._out, self._end = (_index(view_of(x, allocated), allocated) for x in (out, None if own_state else state))

    def __call__(self, arrays: list[Array], state: Any, pointers: list[int]) -> tuple[Any, Any] | None:
        if self._own_state and (key := tuple(pointers)) not in self._apart:
            if self._overlaps(pointers):
                return None  # computed in full: checking the arguments raises the error
            if len(self._apart) < MOST_APART:
                self._apart.add(key)
        allocated = self._launches(pointers)
        out, end = self._out, self._end
        out = allocated[out] if type(out) is int else get(out, allocated)
        if self._own_state:
            return out, state
        return out, allocated[end] if type(end) is int else get(end, allocated)

    def _overlaps(self, pointers: list[int]) -> bool:
        """Whether the state that is overwritten may share memory with another array."""
        low, high = self._spans[self._at]
        begin, end = pointers[self._at] + low, pointers[self._at] + high
        for n, (pointer, (low, high)) in enumerate(zip(pointers, self._spans, strict=True)):
            if pointer + low < end and begin < pointer + high and n != self._at:
                return True
        return False


def _index(view: Any, allocated: list[Array]) -> Any:
    """The place of an array that is given back as it was allocated, else its view."""
    same = type(view) is View and not view.transposed and view.shape == tuple(allocated[view.of].shape)
    return view.of if same else view


def signature(
    spec: VariantSpec, kind: Any, arrays: tuple[Any, ...], keywords: Mapping[str, Any]
) -> Signature | None:
    """The signature of a call on CuPy arrays, which are of type `kind`; None where more than this settles it.

    A dense array has the strides of its shape. That is asked of an attribute that CuPy does not document: its public
    ways take 3 and 6 times as long (0.12 and 0.21 us against 0.04 on an H200's host, 2026-11-22), for six arrays 4 % of
    a step of decoding.
    """
    device, low, state = launch.current_device(), 0, None
    parts: list[Any] = [spec.name, device, len(arrays)]
    given: list[Array] = []
    pointers: list[int] = []
    for x in arrays:
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
        else:
            return None
    for name, x in keywords.items():
        if type(x) is kind:
            data = x.data
            if data.device_id != device or name == "cu_seqlens":
                return None
            pointer = data.ptr
            low |= pointer
            parts += name, x.shape, x._c_contiguous or x.strides, x.dtype
            pointers.append(pointer)
            given.append(x)
            if name == "state":
                state = x
        elif x is None or type(x) in PLAIN:
            parts += name, type(x), x
        else:
            return None
    if low & 15:
        parts += [pointer & 15 for pointer in pointers]
    return new(Signature, (tuple(parts), given, state, pointers))


def _span(x: Array) -> tuple[int, int]:
    """Offsets from the address of an array to its first byte and to the end of its last."""
    spans = [stride * (n - 1) for stride, n in zip(x.strides, x.shape, strict=True)]
    return sum(s for s in spans if s < 0), sum(s for s in spans if s > 0) + x.itemsize


def store(signature: Signature, recorder: Recorder, out: Any, state: Any, own_state: bool) -> None:
    """Record the plan of a call, if it can be replayed."""
    if not replay.ENABLED or not recorder.launches or (own_state and signature.state is None):
        return
    try:
        plan = Plan(recorder, signature, out, state, own_state)
    except LookupError:  # the call also copied or computed by other means
        return
    replay.store(signature.key, plan)


# forward and pullback


class Pullback(NamedTuple):
    """A recorded pullback: its launches, the type of its gradients and a view for each."""

    launches: LaunchSequence
    kind: Callable[..., Any]
    views: tuple[Any, ...]


class Forward:
    """A recorded forward of vjp, and its recorded pullbacks by the layout of their cotangents.

    residuals: positions, among the arrays given and allocated, of those that the pullback may read. A pullback that
    cannot be replayed is stored as None; its forward is then not replayed either, since it would run twice.
    """

    def __init__(self, recorder: Recorder, given: list[Array], results: tuple[Any, ...], residuals: list[Array]):
        """Raises LookupError if the call cannot be replayed."""
        pool = [*given, *recorder.allocated]
        places = {x.data.ptr: n for n, x in enumerate(pool)}
        self.results = tuple(view_of(x, pool) for x in results)
        read = dict.fromkeys(n for x in residuals if (n := places.get(x.data.ptr)) is not None and n >= len(given))
        self.residuals = tuple(read)
        self.launches = LaunchSequence(recorder, given)
        self.pullbacks: dict[Hashable, Pullback | None] = {}

    @property
    def replayable(self) -> bool:
        """Whether every pullback so far was recorded."""
        return None not in self.pullbacks.values()


class Residuals(NamedTuple):
    """A recorded forward, and the arrays of one call that its pullback may read."""

    key: Hashable
    forward: Forward
    arrays: list[Array]


def forward_key(signature: Signature) -> Hashable:
    return "vjp", os.environ.get(policy.SAVED_VARIABLE), *signature.key


def find_forward(signature: Signature) -> Forward | None:
    """The recorded forward of a signature, if its pullbacks were recorded too."""
    found = replay.known(forward_key(signature))
    return found if found is not None and found.pullbacks and found.replayable else None


def replay_forward(forward: Forward, signature: Signature) -> tuple[list[Any], Residuals]:
    """([out, final state], None for results that are not returned; the residuals of the pullback)."""
    pool = [*signature.arrays, *forward.launches(signature.pointers)]
    arrays = [*signature.arrays, *(pool[n] for n in forward.residuals)]
    return [get(view, pool) for view in forward.results], Residuals(forward_key(signature), forward, arrays)


def record_forward(
    signature: Signature, recorder: Recorder, results: tuple[Any, ...], residuals: Any
) -> Residuals | None:
    """Record a forward and return the residuals of its pullback; None if it cannot be replayed."""
    if not replay.ENABLED:
        return None
    key = forward_key(signature)
    pool = [*signature.arrays, *recorder.allocated]
    if (forward := replay.known(key)) is None:
        try:
            forward = Forward(recorder, signature.arrays, results, arrays_of(residuals))
        except LookupError:  # the call also copied or computed by other means
            return None
    if not forward.replayable:
        return None
    return Residuals(key, forward, signature.arrays + [pool[n] for n in forward.residuals])


def replay_pullback(recorded: Residuals | None, cotangents: tuple[Any, ...]) -> Any:
    """The gradients by a recorded pullback; None if there is none for these cotangents."""
    if recorded is None or not recorded.forward.pullbacks or (layout := _layout(cotangents)) is None:
        return None
    if (found := recorded.forward.pullbacks.get(layout)) is None:
        return None
    given = _with_cotangents(recorded, cotangents)
    pool = given + found.launches([x.data.ptr for x in given])
    return found.kind(*(get(view, pool) for view in found.views))


def store_pullback(recorded: Residuals | None, cotangents: tuple[Any, ...], recorder: Recorder, gradients: Any) -> None:
    """Record the plan of a pullback, or that it cannot be replayed."""
    if recorded is None or (layout := _layout(cotangents)) is None or layout in recorded.forward.pullbacks:
        return
    given = _with_cotangents(recorded, cotangents)
    if len({x.data.ptr for x in given}) < len(given):  # one array given twice: the plan does not apply to two
        return
    try:
        pool = [*given, *recorder.allocated]
        views = tuple(view_of(x, pool) for x in gradients)
        recorded.forward.pullbacks[layout] = Pullback(LaunchSequence(recorder, given), type(gradients), views)
    except LookupError:
        recorded.forward.pullbacks[layout] = None
    replay.store(recorded.key, recorded.forward)


def _with_cotangents(recorded: Residuals, cotangents: tuple[Any, ...]) -> list[Array]:
    return [*recorded.arrays, *arrays_of(cotangents)]


def _layout(cotangents: Any) -> Hashable | None:
    """The key of a pullback; None unless all cotangents are CuPy arrays or None."""
    key: list[Any] = [launch.current_device()]
    for x in cotangents:
        if x is None:
            key.append(None)
        elif is_on_device(x):
            key.append((x.shape, x.strides, x.dtype, x.data.ptr & 15, x.data.device_id))
        else:
            return None
    return tuple(key)


def arrays_of(x: Any) -> list[Array]:
    """The CuPy arrays among nested tuples, lists and dicts."""
    if isinstance(x, dict):
        x = tuple(x.values())
    if isinstance(x, tuple | list):
        return [y for part in x for y in arrays_of(part)]
    return [x] if is_on_device(x) else []
