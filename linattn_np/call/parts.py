"""Large calls whose inputs of the core, or their gradients, are wider than the caller's: some tokens at a time.

A part begins with the state that the one before it ends with; the pullback goes from the last part to the first one,
makes the inputs of the core anew, and hands the gradient of the state on. So temporary memory is that of a part, and
between the passes a part keeps what its core keeps beside its inputs. Numbers of tokens have the bits of a whole call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

from ..ops.host import has_compiler, kernels, write
from ..ops.sums import added
from ..runtime.arrays import NARROW, Array, dtype_name, gradient_like, is_numpy
from ..runtime.pieces.memory import up
from ..runtime.recorder import refuse
from ..runtime.unchanged import check_unchanged, mark
from ..spec import Call
from .binding import inputs_of
from .pieces import time_of
from .results import Result, cotangents, finish, finished, form_of, gradients, returned

LEAST, TOKENS, MOST = 1 << 20, 64, 64  # numbers of a part's widest array, and its tokens, at least; parts, at most
INPUTS = object()  # in the place of the core's inputs in residuals that are kept

Tokens = tuple[int, int]  # the first one, one past the last


def parts_of(call: Call) -> list[Tokens]:
    """The tokens of the parts of a call; one part if it is computed as a whole."""
    spec, T = call.spec, call.sizes["T"]
    if not spec.change.by_tokens or not _is_plain(call):
        return [(0, T)]
    most = max(x.size for x in (getattr(call, n) for n in spec.arrays) if x is not None)
    count = max(min(most // LEAST, T // TOKENS, MOST), 1)
    each = up(max(-(-T // count), 1), _whole(call))
    ends = [t for t in range(each, T, each) if T - t >= TOKENS]  # a short sequence may have another form
    return list(pairwise([0, *ends, T]))


def _whole(call: Call) -> int:
    """Tokens whose multiples are whole chunks, of a number that the call or the core chooses."""
    C = call.options["chunk_size"]
    return TOKENS if C is None else max(TOKENS // C, 1) * C


def _is_plain(call: Call) -> bool:
    """Whether compiled loops compute a call of wider numbers without ragged sequences, and return new arrays."""
    options, change = call.options, call.spec.change
    value, C = str(change.value), options["chunk_size"]
    if change.query is not None and (getattr(call, change.query) is None or not call.plan.causal):
        return False
    if C is not None and (isinstance(C, str) or C > TOKENS):
        return False
    if dtype_name(getattr(call, value)) not in NARROW and value not in call.spec.complex_arrays:
        return False
    is_compiled = is_numpy(call.xp) and has_compiler() and options["backend"] in (None, "numba")
    is_new = call.rows is None and not options["overwrite_state"] and options["return_states_at"] is None
    return is_compiled and is_new and not call.is_ragged and options["layout"] == "time_first"


def forward(call: Call, parts: list[Tokens]) -> Any:
    """The public result."""
    return returned(call, _computed(call, parts, [])[0])


def vjp(call: Call, parts: list[Tokens], given: Mapping[str, Any], limit: Any, pull: Callable[..., Any]) -> Any:
    """(the public result, pullback).

    given: the caller's arrays by name. limit(): a context with the call's threads. pull: from the gradients of a core's
    outputs to those of the arrays by name and of the initial state.
    """
    spec, kept = call.spec, list[Any]()
    with limit():
        result, end = _computed(call, parts, kept)
    form, marks, call = form_of(call.library, result.out), mark(given), call.changed(recorder=None)

    def pullback(dout: Any = None, dstate: Any = None) -> Any:
        """Gradients by input name, of every array that was given and of the state."""
        check_unchanged(spec.name, marks)
        with limit():
            d_out, d_state, _ = cotangents(call, dout, dstate, form, end)
            found = _Gradients(call)
            for tokens, each in zip(reversed(parts), reversed(kept), strict=True):
                d_state = found.add(tokens, each, pull, d_out, d_state)
            return gradients(call, found.arrays, d_state)

    return returned(call, result), pullback


def _of_tokens(call: Call, tokens: Tokens, state: Any) -> Call:
    """The call on some tokens, from a state of the core on."""
    arrays, T = {n: _cut(getattr(call, n), time_of(call, n), tokens) for n in call.spec.arrays}, tokens[1] - tokens[0]
    rows = tuple(s._replace(stop=s.stop // call.sizes["T"] * T) for s in call.plan.sequences)
    sizes, plan = call.sizes | {"T": T}, call.plan._replace(has_state=state is not None, sequences=rows)
    library = call.library._replace(give_back=lambda x: x)
    return call.changed(**arrays, initial=state, sizes=sizes, plan=plan, library=library, recorder=None)


def _cut(x: Array | None, time: int | None, tokens: Tokens) -> Array | None:
    """Tokens of an array; one without an axis of tokens as it is."""
    return x if x is None or time is None else x[(*(slice(None),) * time, slice(*tokens))]


def _computed(call: Call, parts: list[Tokens], kept: list[Any]) -> tuple[Result, Array]:
    """(the public result, the core's final state). Appends what `_part` returns to be kept of the parts to `kept`."""
    refuse("a large call is computed some tokens at a time")
    whole, state = None, call.initial
    for tokens in parts:
        out, state, each = _part(call, tokens, state)
        kept.append(each if call.plan.gradients else None)
        time = time_of(call, str(call.spec.change.value))
        whole = (
            _empty(call, (*out.shape[:time], call.sizes["T"], *out.shape[time + 1 :]), out) if whole is None else whole
        )
        write(call.xp, _cut(whole, time, tokens), out)
    own = finish(call, None, state)[1] if call.options["return_state"] else None
    return Result(call.library.give_back(whole), own), state


def _part(call: Call, tokens: Tokens, state: Any) -> tuple[Array, Array, Any]:
    """(out in the caller's dtype, the core's final state, (core, residuals without inputs, first state, out))."""
    own, is_read = _of_tokens(call, tokens, state), call.spec.change.keeps_out
    x = inputs_of(own)
    out, end, residuals = x.computation.forward(own.name, x, own.plan, state, own.options["backend"])
    kept = x.computation, exchanged(residuals, x, INPUTS), state, out if is_read else None
    return finished(own, out, end).out, end, kept


def exchanged(kept: Any, old: Any, new: Any) -> Any:
    """Residuals with `new` in the place of `old`."""
    if kept is old:
        return new
    if not isinstance(kept, tuple):
        return kept
    each = (exchanged(x, old, new) for x in kept)
    return type(kept)(*each) if hasattr(kept, "_fields") else tuple(each)


def _empty(call: Call, shape: tuple[int, ...], like: Array) -> Array:
    return kernels(call.xp).working(shape, like.dtype)


class _Gradients:
    """Gradients by name, put together from those of parts; of arrays without tokens their sums."""

    def __init__(self, call: Call):
        self.call, self.arrays = call, dict[str, Array]()

    def add(self, tokens: Tokens, kept: Any, pull: Callable[..., Any], dout: Array | None, dstate: Any) -> Array:
        """Add those of a part, from the gradients of its results. Returns that of its initial state."""
        core, residuals, state, out = kept
        call, value = self.call, str(self.call.spec.change.value)
        own = _of_tokens(call, tokens, state)
        d: tuple[Any, Any, Any] = _cut(dout, time_of(call, value), tokens), dstate, {}
        found, begin = pull(own, core.backward, exchanged(residuals, INPUTS, inputs_of(own)), out, d)
        for name, y in found.items():
            self._put(name, tokens, y)
        return begin

    def _put(self, name: str, tokens: Tokens, y: Array) -> None:
        x, time, xp = getattr(self.call, name), time_of(self.call, name), self.call.xp
        if x is None:
            return
        if time is None:
            self.arrays[name] = added(xp, self.arrays[name], y) if name in self.arrays else y
            return
        if name not in self.arrays:
            self.arrays[name] = _empty(self.call, x.shape, x)
        write(xp, _cut(self.arrays[name], time, tokens), gradient_like(xp, y, x))
