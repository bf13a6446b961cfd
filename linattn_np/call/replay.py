"""Replay: a call with a known signature runs its recorded plan on the new arrays.

Checking and planning a small call takes longer than computing it. A successful call is therefore recorded under its
signature key: everything that its checks and its plan depend on, except the numbers in its arrays. Recorded plans:

    CuPy    the kernel launches, with the positions of pointers among their arguments: forward, and forward and pullback
            of vjp. Only for calls that did nothing else on the device.
    NumPy   the tables of the compiled loops, with the positions of addresses; for all other calls, and for vjp, a
            Template: the checked options, sizes, plan and backend, to which other arrays are bound.

Row numbers of a state pool on the host, and which sequences begin without a state, are part of the key with their
values, on NumPy up to 512; on a device only launches read them. Not recorded: ragged batches, other row numbers on the
host, arrays without a view (foreign.py), an array as an option, one array given twice (but for vjp on NumPy arrays), a
layout that raises a warning. LINATTN_REPLAY=0 in the environment at import disables replay; `clear()` deletes all
plans.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ..core import COMPUTATIONS, Computation
from ..runtime import shapes
from ..runtime.arrays import is_cupy
from ..runtime.held import empty_all, held_bytes
from ..runtime.tracing import FIXED, Untraceable, of_output, traced_variables
from ..spec import Variables, VariantSpec
from .binding import Prepared, axes_of, normalise
from .layouts import LAYOUTS, ONE_TOKEN, before
from .options import PLAIN, is_plain_tuple
from .results import traced_output

Array = Any
MOST = 512  # recorded plans at most
MOST_BYTES = 64 << 20  # of all plans in host memory, and as many on a device
LEAST = 16 << 10  # bytes of the Python objects of a plan, where it does not say more
ROWS = ("state_rows", "fresh")
ON_HOST = ("cu_seqlens", *ROWS)  # the plan depends on their values
NOT_GIVEN = frozenset(("state", *ON_HOST))  # arrays that are not among those of a signature
MOST_ROWS = 512  # rows of a pool, on the host, that are part of a key with their values

ENABLED = os.environ.get("LINATTN_REPLAY", "1") != "0"

# (key, arrays, state, pointers). NumPy: arrays in order, without the state; pointers is None. CuPy: all arrays in
# order, and their pointers. A plain tuple: replay begins with making one.
Signature = tuple[tuple[Any, ...], Any, Any, "list[int] | None"]


class Recorded(NamedTuple):
    """The recorded plan of a plain call.

    plan: (arrays, state, pointers) -> (out, state), or None if the call must be computed in full.
    returns_state: whether the call returns (out, state). is_limited: whether it has the option num_threads.
    reason: why the plan does not compute the whole call; empty if it does.
    """

    plan: Callable[[Any, Any, Any], tuple[Any, Any] | None]
    returns_state: bool
    is_limited: bool
    reason: str = ""


class Composed(NamedTuple):
    """The vjp of a call that is composed of others, which are replayed: from its signature."""

    vjp: Callable[[Signature], Any]


plans: dict[Hashable, Any] = {}  # by key: Recorded; of a vjp Template, Composed or, on CuPy, device_replay.Forward
held: tuple[dict[Hashable, int], dict[Hashable, int]] = {}, {}  # bytes of each plan in host memory, and on a device
makers: dict[Any, Any] = {}  # by type of array: the function that makes a signature; None for what is not replayed
ndarray = np.ndarray
new = tuple.__new__  # calling a NamedTuple class takes three times as long


def store(key: Hashable, plan: Any) -> None:
    """Record a plan, in place of the oldest ones if all would exceed MOST or MOST_BYTES.

    A plan, or the object that it is a method of, says what it holds: `nbytes` in host memory, LEAST without, and
    `device_nbytes`, 0 without. A plan that has grown is stored again.
    """
    if not ENABLED:
        return
    plans[key], (host, device) = plan, held
    host[key], device[key] = size_of(plan)
    while len(host) > MOST or max(sum(host.values()), sum(device.values())) > MOST_BYTES:
        oldest, *_ = host  # in one step: other threads may record
        for each in (plans, host, device):
            each.pop(oldest, None)


def size_of(plan: Any) -> tuple[int, int]:
    """Bytes of a plan in host memory and on a device."""
    run = plan.plan if type(plan) is Recorded else plan
    owner = getattr(run, "__self__", run)
    return getattr(owner, "nbytes", LEAST), getattr(owner, "device_nbytes", 0)


def count() -> int:
    """The number of recorded plans."""
    return len(plans)


def clear() -> None:
    """Delete every recorded plan."""
    for each in (plans, *held):
        each.clear()


def clear_cache() -> None:
    """Free what calls keep in memory for later ones, in this process.

    Recorded plans, on the host and on devices; tables of feature maps and sizes; scratch memory of the calling thread
    and of helper threads that wait for work. The next calls are first calls again. Compiled code stays, in memory and
    on disk.
    """
    clear()
    empty_all()


def vjp_key(signature: Signature) -> Hashable:
    """The key of a vjp."""
    return "vjp", signature[0]


# signatures


def signature(spec: VariantSpec, arrays: tuple[Any, ...], keywords: Mapping[str, Any]) -> Signature | None:
    """The signature of a call; None if its plan depends on more than a signature holds."""
    first = type(arrays[0] if arrays else next(iter(keywords.values()), None))
    if first is not ndarray and (other := makers.get(first)) is not None:
        return other(spec, arrays, keywords)
    parts: list[Any] = [spec.name]
    given: list[np.ndarray] = []
    state = None
    for x in arrays:
        if type(x) is ndarray:
            parts += x.shape, x.strides, x.dtype
            given.append(x)
        elif x is None:
            parts.append(None)
        else:
            return None if (other := signature_maker(type(x))) is None else other(spec, arrays, keywords)
    for name, x in keywords.items():
        kind = type(x)
        if kind is ndarray:
            parts += name, x.shape, x.strides, x.dtype
            if name not in NOT_GIVEN:
                given.append(x)
            elif name == "state":
                state = x
                parts.append(x.flags.writeable)
            elif name not in ROWS or x.size > MOST_ROWS:
                return None
            else:
                parts.append(x.tobytes())
        elif x is None or kind in PLAIN:
            parts += name, kind, x  # with the type: True == 1, but they are different options
        elif name == "state" and isinstance(x, tuple):
            state = x
            parts += name, len(x)
            for S in x:
                if type(S) is not ndarray:
                    return None
                parts += S.flags.writeable, S.shape, S.strides, S.dtype
        elif name in ROWS and kind in (list, tuple) and len(x) <= MOST_ROWS and set(map(type, x)) <= {int, bool}:
            parts += name, kind, tuple(map(type, x)), tuple(x)
        elif is_plain_tuple(x := tuple(x) if kind is list else x) and name not in ON_HOST:
            parts += name, kind, tuple(map(type, x)), x
        else:
            other = None if given else signature_maker(kind)
            return None if other is None else other(spec, arrays, keywords)
    return tuple(parts), given, state, None


def signature_maker(kind: Any) -> Any:
    """The function that makes the signature of a call on arrays of this type; None for what is not replayed."""
    if kind not in makers:
        makers[kind] = None
        if kind.__name__ == "ndarray" and kind.__module__.split(".")[0] == "cupy":
            from . import device_replay

            makers[kind] = device_replay.signature_maker(kind)
    return makers[kind]


def names_of(
    spec: VariantSpec, signature: Signature, arrays: tuple[Any, ...], keywords: Mapping[str, Any]
) -> tuple[str, ...] | None:
    """The names of the arrays of a signature, in its order without the state; None if others cannot be bound to them.

    That is the case if an option is an array, such as row numbers on a device, and for swapped bytes, which are
    converted first.
    """
    kind, in_key = type(next(iter(signature[1]), None)), ROWS if signature[3] is None else ()
    found = [name for name, x in zip(spec.arrays, arrays, strict=False) if type(x) is kind]
    found += [name for name, x in keywords.items() if type(x) is kind and name not in ("state", *in_key)]
    bindable = spec.arrays.keys() >= set(found) and all(y.dtype.isnative for y in _each(signature))
    return tuple(found) if bindable else None


def _each(signature: Signature) -> list[Array]:
    """All arrays of a signature."""
    _, arrays, state, pointers = signature
    if pointers is not None:  # the state is among the arrays
        return arrays
    return [*arrays, *(state if isinstance(state, tuple) else () if state is None else (state,))]


def split(signature: Signature) -> tuple[list[Array], Any]:
    """(the arrays without the state, the state)."""
    _, arrays, state, pointers = signature
    own = state if isinstance(state, tuple) else (state,)
    return arrays if pointers is None else [x for x in arrays if not any(x is S for S in own)], state


def is_storable(signature: Signature) -> bool:
    """Whether the plan of a plain call may be recorded: not if there is one, and not for one array given twice."""
    return ENABLED and signature[0] not in plans and has_distinct_arrays(signature)


def has_distinct_arrays(signature: Signature) -> bool:
    """Whether no two arrays begin at one address: a plan would take two different arrays for one."""
    places = signature[3] or [y.__array_interface__["data"][0] for y in _each(signature)]
    return len(set(places)) == len(places)


# plans of calls on NumPy arrays


def compiled_plan(call: Prepared, signature: Signature, names: tuple[str, ...], residuals: Any) -> Any:
    """The plan that the core, or the variant, records: (arrays, state, pointers) -> (out, state).

    The change of variables is traced: its array calls become a part of the plan.
    Raises Untraceable, with the reason, where there is no plan.
    """
    if call.options["layout"] == "heads_first":
        raise Untraceable("the arrays of layout='heads_first' are transposed by every call")
    plan = _recorder(call.spec)(call, names, signature[2], residuals)
    if plan is None:
        raise Untraceable("its core records no plan of such a call")
    return plan if call.options["layout"] == "time_first" else functools.partial(_one_token, plan)


def _recorder(spec: VariantSpec) -> Any:
    """What records the plan of a variant: its own function, or that for states of the core, or for others."""
    if spec.state.record is not None or spec.state.pack is None:
        return spec.state.record or _record
    from .recorded.states import record_state

    return record_state


def _record(call: Prepared, names: tuple[str, ...], state: Any, residuals: Any) -> Any:
    """The plan that the core records."""
    trace, c = traced_variables(call.variables, names)
    inputs = call.spec.change.to_core(c)
    then = None if call.spec.change.from_core is None else of_output(functools.partial(traced_output, call, c))
    return COMPUTATIONS[type(inputs)].record(inputs, call.plan, state, residuals, trace, then)


def _indices(call: Prepared, names: tuple[str, ...]) -> list[Any]:
    """The indices that add the time axis to the caller's arrays of one token."""
    axes, c = axes_of(call.spec, call.options), call.variables
    times = [shapes.time_axis(axes[n], getattr(c, n).ndim, c.sizes.batch) for n in names]
    return [... if time is None else before(time) for time in times]


def _one_token(plan: Any, arrays: list[Array], state: Any, pointers: None) -> tuple[Any, Any] | None:
    """A compiled plan of a call without a time axis: its output has one."""
    found = plan(arrays, state, None)
    return found if found is None or found[0] is None else (found[0][..., 0, :, :], found[1])


def computed_in_full(arrays: list[Array], state: Any, pointers: None) -> None:
    """The plan of calls that are always computed in full."""


class Template:
    """A checked call without its arrays, and without the recorder that has them.

    Other arrays with its signature are bound to it without being checked again.

    The change of variables is computed for every call: it may depend on the numbers.
    """

    nbytes = LEAST

    def __init__(self, key: Hashable, call: Prepared, names: tuple[str, ...], core: Computation, residuals: Any):
        """key: of the plan. names: of the arrays in the order of a signature. core: what returned `residuals`."""
        c, options = call.variables, call.options | {"state": None}
        self._key, self._is_measured = key, is_cupy(c.xp)
        self._fixed = dict.fromkeys(call.spec.arrays) | {n: getattr(c, n) for n in FIXED} | {"options": options}
        self.names = names
        axes = axes_of(call.spec, options)
        self._axes = [axes[n] for n in names] if options["layout"] == "heads_first" else []
        self._indices = _indices(call, names) if options["layout"] == ONE_TOKEN else []
        self._call = call._replace(variables=Variables(), state=None, given_state=None, options=options, recorder=None)
        self.core, self._forward = core, core.repeat(call.spec.name, call.plan, options["backend"], residuals)
        if is_cupy(c.xp) and not call.plan.gradients:
            from .device_replay import RecordedLaunches

            self._forward = RecordedLaunches(self._forward, call.plan.overwrite).forward

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
        if not self._is_measured:  # the first call has recorded its loops
            self._is_measured, self.nbytes = True, LEAST + held_bytes(self)
            if self._key in plans:
                store(self._key, plans[self._key])
        return found
