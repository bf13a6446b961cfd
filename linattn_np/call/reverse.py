"""The option reverse: the recurrence goes from the last token to the first, in each sequence.

f in reverse is flip f flip: the call in the usual direction on arrays with their tokens in reverse order, which are
views on NumPy. In a packed row the sequences are in reverse order too; offsets, states and positions follow. The
transpose is the same composition.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from ..runtime.arrays import Array, enter, is_cupy, is_mutable, is_numpy
from ..runtime.shapes import flatten, head_axis, is_of_pairs, unflatten
from ..spec import Call, VariantSpec
from .binding import is_cut, is_recordable, normalise, prepare
from .layouts import LAYOUTS
from .pieces import time_of
from .replay import plans
from .replay.plans import Signature, has_distinct_arrays, is_storable, names_of, split, vjp_key, without
from .results import Result, StatesResult, gradients_of

Arrays = tuple[Any, ...]
Keywords = Mapping[str, Any]
Run = Callable[[VariantSpec, Arrays, Keywords], Any]  # a call in the usual direction


def run(call_of: Run, spec: VariantSpec, arrays: Arrays, keywords: Keywords, signature: Signature | None) -> Any:
    """The result of a public function in reverse; call_of runs a call in the usual direction."""
    call = prepare(spec, arrays, keywords)
    flipped = Flipped(call, arrays, keywords)
    found = flipped.result(call_of(spec, (), flipped.given(flipped.arrays_of(call), call.given_state)))
    if signature is not None and is_recordable(call) and not is_cut(call) and is_storable(signature):
        names = names_of(spec, signature, arrays, keywords)
        if names is not None:
            plan = functools.partial(_repeated, flipped, names, call_of)
            plans.store(signature[0], plan)
    return found


def _repeated(flipped: Flipped, names: tuple[str, ...], call_of: Run, arrays: list[Array], state: Any, pointers: Any
              ) -> Any:  # fmt: skip
    """The recorded plan of a call in reverse: other arrays in reverse order, and the recorded plan of that call."""
    given = dict(zip(names, without(arrays, state), strict=True))
    return flipped.result(call_of(flipped.spec, (), flipped.given(given, state)))


def run_vjp(
    vjp_of: Run, spec: VariantSpec, arrays: Arrays, keywords: Keywords, signature: Signature | None
) -> tuple[Any, Callable[..., Any]]:
    """(result, pullback) of a call in reverse; vjp_of is the vjp of a call in the usual direction."""
    call = prepare(spec, arrays, keywords)
    flipped = Flipped(call, arrays, keywords, has_vjp=True)
    if signature is not None and is_recordable(call) and not is_cut(call) and has_distinct_arrays(signature):
        names = names_of(spec, signature, arrays, keywords)
        if names is not None:
            repeated = functools.partial(_repeated_vjp, flipped, names, vjp_of)
            plans.store(vjp_key(signature), plans.Composed(repeated))
    return flipped.pulled(*vjp_of(spec, (), flipped.given(flipped.arrays_of(call), call.given_state)))


def _repeated_vjp(flipped: Flipped, names: tuple[str, ...], vjp_of: Run, signature: Signature) -> Any:
    arrays, state = split(signature)
    return flipped.pulled(*vjp_of(flipped.spec, (), flipped.given(dict(zip(names, arrays, strict=True)), state)))


class Flipped:
    """A checked call in reverse, as a call in the usual direction, for any arrays of its signature."""

    def __init__(self, call: Call, arrays: Arrays, keywords: Keywords, has_vjp: bool = False):
        self.spec, self.library, self.xp = call.spec, call.library, call.xp
        self._given_options = call.options
        heads_first = call.options["layout"] == "heads_first"
        self._out = -2 if heads_first else -1 - call.spec.row_axes  # the time axis of outputs
        self._is_ragged = call.options["cu_seqlens"] is not None
        self._positions = 0 if self._is_ragged else len(call.batch)  # their axis
        axes = call.axes
        self._axes: dict[str, int | None] = {}  # the time axis of each array
        for name in call.spec.arrays:
            if getattr(call, name) is not None:
                if is_of_pairs(axes[name]):
                    raise ValueError(
                        f"{call.name}: {name} with reverse=True, expected no {name}: all arrays in "
                        "reverse order, this one on both axes of tokens, are the same call"
                    )
                time = time_of(call, name)
                self._axes[name] = None if time is None else time + heads_first * head_axis(axes[name])
        self._options = self._usual(call, dict(zip(call.spec.arrays, arrays, strict=False)) | dict(keywords), has_vjp)
        self._flips_state = self._is_ragged and self._options.get("state_rows") is None
        self._overwrites = call.options["overwrite_state"] and is_mutable(self.xp)

    def _usual(self, call: Call, given: dict[str, Any], has_vjp: bool) -> dict[str, Any]:
        """The options of the call in the usual direction."""
        options, T = call.options, call.sizes["T"]
        found = {n: x for n, x in given.items() if n not in {"reverse", "check", "state", *self._axes}}
        if (offsets := options["cu_seqlens"]) is not None:
            found["cu_seqlens"] = [T - n for n in offsets[::-1]]
            rows = call.rows
            if rows is not None and rows.fresh is not None:
                found["fresh"] = flip(self.xp, rows.fresh, 0)
            if rows is not None and rows.at is not None:
                found["state_rows"] = flip(self.xp, rows.at, 0)
            elif options["overwrite_state"] and not has_vjp:  # each row is written where it lies
                found["state_rows"] = list(range(len(offsets) - 1))[::-1]
        if options["return_states_at"] is not None:
            found["return_states_at"] = [T - n for n in options["return_states_at"][::-1]]
        return found

    def arrays_of(self, call: Call) -> dict[str, Array]:
        """The arrays of a call in the caller's layout."""
        layout, axes = LAYOUTS.get(call.options["layout"]), call.axes
        batch, given = call.batch, {name: getattr(call, name) for name in self._axes}
        return given if layout is None else {n: layout.leave(self.xp, x, axes[n], batch) for n, x in given.items()}

    def given(self, arrays: Mapping[str, Array], state: Any) -> dict[str, Any]:
        """The arguments of the call in the usual direction."""
        given = self._options | {name: self._tokens(x, self._axes[name]) for name, x in arrays.items()}
        if state is not None:
            given["state"] = self._sequences(state) if self._flips_state else state
        return given

    def _tokens(self, x: Array, axis: int | None) -> Array:
        """The tokens in reverse order; CUDA kernels, and their recorded launches, take arrays without gaps."""
        if axis is None:
            return x
        y = flip(self.xp, x, axis)
        return self.xp.ascontiguousarray(y) if is_cupy(self.xp) else y

    def _sequences(self, state: Any) -> Any:
        """The states, one per sequence, in reverse order; unchanged if the batch is not ragged."""
        return _each(lambda S: flip(self.xp, S, 0), state) if self._is_ragged and state is not None else state

    def _back(self, x: Array, axis: int | None) -> Any:
        """An array of the caller's library, flipped; where it is not NumPy's or CuPy's, without negative strides."""
        y = x if axis is None else flip(self.xp, x, axis)
        own = axis is None or self.library.name in ("numpy", "cupy")
        return self.library.give_back(y if own else self.xp.asarray(y, copy=True))

    def result(self, found: Any) -> Any:
        """The public result, from that of the call in the usual direction."""
        if not isinstance(found, Result | StatesResult):
            return self._back(found, self._out)
        out = None if found.out is None else self._back(found.out, self._out)
        axis = 0 if self._is_ragged and not self._overwrites else None
        end = None if found.state is None else _each(lambda S: self._back(S, axis), found.state)
        if isinstance(found, Result):
            return Result(out, end)
        return StatesResult(out, end, _each(lambda S: self._back(S, self._positions), found.states))

    def pulled(self, found: Any, pull: Callable[..., Any]) -> tuple[Any, Callable[..., Any]]:
        """(result, pullback) from those of the call in the usual direction."""

        def pullback(dout: Any = None, dstate: Any = None, dstates: Any = None) -> Any:
            """Gradients by input name, of every array that was given and of the state."""
            dout = None if dout is None else self._entered("dout", dout, self._out)
            axis = 0 if self._is_ragged else None
            given = [dout, None if dstate is None else self._entered("dstate", dstate, axis)]
            given += [] if dstates is None else [self._entered("dstates", dstates, self._positions)]
            grads = pull(*given)._asdict()
            state = grads.pop("state")
            values = [None if d is None else self._back(d, self._axes[name]) for name, d in grads.items()]
            state = None if state is None else _each(lambda S: self._back(S, axis), state)
            return gradients_of((*grads, "state"), *values, state)

        return self.result(found), pullback

    def _entered(self, name: str, d: Any, axis: int | None) -> Any:
        """A cotangent, flipped; what has too few axes is left to the checks of the usual direction."""
        d = normalise(self.spec, name, d, self._given_options)
        _, entered = enter(self.spec.name, flatten(name, d), self.library)
        least = 0 if axis is None else axis + 1 if axis >= 0 else -axis  # axes that it needs
        each = [x if axis is None or x.ndim < least else flip(self.xp, x, axis) for x in entered.values()]
        return unflatten(d, each)


def flip(xp: Any, x: Array, axis: int) -> Array:
    """x in reverse order along an axis: a view where the library has strides."""
    if x.shape[axis] < 2:
        return x
    if not is_numpy(xp):
        return xp.flip(x, axis=axis)
    return x[(slice(None),) * (axis % x.ndim) + (slice(None, None, -1), ...)]


def _each(f: Callable[[Array], Any], state: Any) -> Any:
    """f of every part of a state."""
    return unflatten(state, [f(S) for S in flatten("", state).values()])
