"""States at positions between the core and the caller: (..., n, H, K, V), of a ragged batch (n, H, K, V)."""

from __future__ import annotations

from math import prod
from typing import Any

from ..core import StatesAt
from ..runtime import shapes
from ..runtime.arrays import Array, as_computed, enter, is_complex
from ..runtime.shapes import flatten, unflatten
from ..spec import Call
from .binding import normalise


def states_at(call: Call, at: Any) -> Any:
    """The public states at the positions, from the core's."""
    state = call.spec.state
    if state.unpack_at is not None:
        states = state.unpack_at(call, at, _prefixes(call))
    else:
        states = state.unpack(call, at) if state.unpack else at
    xp, counts = call.xp, call.spec.core.STATE_COUNTS
    each = [call.library.give_back(S if n[1:] in counts else as_computed(xp, S, call.dtype))
            for n, S in flatten("", states).items()]  # fmt: skip
    return unflatten(states, each)


def core_cotangents(call: Call, dstate: Any, dstates: Any, like: Any, at: Any) -> tuple[Any, dict[str, Array]]:
    """(the core's gradient of a StatesAt, or None; gradients by name that unpack_at_vjp returns).

    dstate: the core's own; dstates: the caller's; like: the caller's states; at: the core's.
    """
    if dstates is None:
        return None if dstate is None else StatesAt(dstate, None), {}
    d = checked(call, "dstates", dstates, like)
    d = unflatten(d, [as_computed(call.xp, x, call.dtype) for x in flatten("", d).values()])
    if call.spec.state.unpack_at_vjp is None:
        return StatesAt(dstate, _packed(call, d)), {}
    dat, grads = call.spec.state.unpack_at_vjp(call, at, d, _prefixes(call))
    return StatesAt(dstate, dat), grads


def _prefixes(call: Call) -> list[shapes.Sequence]:
    """The tokens before each position, of its sequence."""
    return shapes.prefixes(call.sequences, call.options["return_states_at"])


def checked(call: Call, name: str, d: Any, like: Any) -> Any:
    """A cotangent of states, checked; None if it is not given."""
    if d is None:
        return None
    fn = call.name
    d = normalise(call.spec, name, d, call.options)
    if isinstance(d, tuple) != isinstance(like, tuple):
        raise TypeError(f"{fn}: {name} is a {type(d).__qualname__}, expected a {type(like).__name__}")
    entered = enter(fn, flatten(name, d), call.library)[1]
    for (part, x), S in zip(entered.items(), flatten(name, like).values(), strict=True):
        if part.rpartition(".")[2] not in call.spec.core.STATE_COUNTS:
            shapes.check_dtype(fn, part, x, is_complex(S))
        if tuple(x.shape) != tuple(S.shape):
            raise ValueError(f"{fn}: {part} has shape {tuple(x.shape)}, expected {tuple(S.shape)}")
    return unflatten(d, list(entered.values()))


def _packed(call: Call, d: Any) -> Any:
    """The transpose of unpack: `pack` of the states at all positions, as of the sequences of a ragged batch."""
    xp, state = call.xp, call.spec.state
    if state.unpack is None or state.pack is None:
        return d
    parts = list(flatten("", d).values())
    lead = parts[0].shape[: 1 if call.is_ragged else len(call.batch) + 1]
    rows = [xp.reshape(x, (prod(lead), *x.shape[len(lead) :])) for x in parts]
    packed = state.pack(call.changed(sizes=call.sizes | {"sequences": prod(lead)}), unflatten(d, rows))
    each = [xp.reshape(x, (*lead, *x.shape[1:])) for x in (packed if isinstance(packed, tuple) else (packed,))]
    return tuple(each) if isinstance(packed, tuple) else each[0]
