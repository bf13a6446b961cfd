"""The pullback of a call that is computed piece by piece: the pullbacks of its pieces, in reverse order."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from ..runtime import shapes
from ..runtime.arrays import Array, enter
from ..spec import Call
from .layouts import LAYOUTS
from .pieces import Computed, Piece, Run, compute, continues, each, end_of, finished, rows_of, states_at, time_of
from .positions import checked
from .results import Form, form_of, gradients_of


def vjp(
    call: Call, keywords: Mapping[str, Any], run: Run, final: Callable[..., Any], result: Any = None
) -> tuple[Any, Callable[..., Any]]:
    """(the public result, pullback); run returns a piece's ((out, state), pullback).

    result: the public one, if it is known. The first pullback then computes the pieces.
    """
    computed = functools.cache(lambda: compute(call, keywords, run))
    result = finished(call, *computed(), final) if result is None else result

    def pullback(dout: Any = None, dstate: Any = None, dstates: Any = None) -> Any:
        """Gradients by input name, of every array that was given and of the state."""
        fn = call.name
        if dout is None and dstate is None and dstates is None:
            raise TypeError(f"{fn}: the pullback got no cotangent, expected dout, dstate or dstates")
        found, out, ends = computed()
        states = None if call.options["return_states_at"] is None else states_at(call, found, ends)
        end, form = end_of(call, found, ends), None if out is None else form_of(call.library, out)
        if dstates is not None and states is None:
            raise TypeError(f"{fn}: the pullback got dstates, expected None without return_states_at")
        return _gradients(call, found, checked_rows(call, dout, form), checked(call, "dstate", dstate, end),
                          checked(call, "dstates", dstates, states))  # fmt: skip

    return result, pullback


def checked_rows(call: Call, dout: Any, form: Form | None) -> Array | None:
    """dout, checked, in time-first layout."""
    if dout is None:
        return None
    fn, layout = call.name, LAYOUTS.get(call.options["layout"])
    d = enter(fn, {"dout": dout}, call.library)[1]["dout"]
    shape, complex_out = (None, False) if form is None else form
    shapes.check_dtype(fn, "dout", d, complex_out)
    wanted = shape if layout is None or shape is None else layout.shape(shape, call.spec.row_axes)
    if tuple(d.shape) != wanted:
        raise ValueError(f"{fn}: dout has shape {tuple(d.shape)}, expected {wanted or 'None: there is no out'}")
    return d if layout is None else layout.enter_rows(call.xp, d, call.spec.row_axes)


def _gradients(call: Call, found: Computed, dout: Any, dstate: Any, dstates: Any) -> Any:
    """The gradients as a named tuple by input name."""
    pieces, xp, later, begins = found.pieces, call.xp, None, []
    parts: dict[str, list[Array]] = {name: [] for name in call.spec.arrays}
    for n in reversed(range(len(pieces))):
        piece, pull = pieces[n], found.results[n][1]
        d = (
            None
            if dout is None or piece.queries is None
            else dout[(..., piece.queries, *(slice(None),) * call.spec.row_axes)]
        )
        dS = later
        if piece.ends and dstate is not None and (call.is_ragged or n == len(pieces) - 1):
            dS = _sum(dS, rows_of(call, dstate, piece))
        for at, where in enumerate(found.at):
            if where == n and dstates is not None:
                dS = _sum(dS, _at(call, dstates, at, piece))
        grads = None if d is None and dS is None else pull(d, dS)
        for name, x in found.given[n].items():
            if hasattr(x, "shape"):
                parts[name].append(xp.zeros_like(x) if grads is None else getattr(grads, name))
        begin = None if grads is None else grads.state
        later = begin if continues(pieces, n) else None
        if not continues(pieces, n):
            begins.append(begin if begin is not None else each(xp.zeros_like, rows_of(call, found.begin, piece)))
    state = None
    if call.given_state is not None:
        state = each(lambda *rows: rows[0] if len(rows) == 1 else xp.concat(rows, axis=0), *begins[::-1])
        for at, where in enumerate(found.at):
            if where < 0 and dstates is not None:
                state = _at_begin(call, state, dstates, at)
        state = each(call.library.give_back, state)
    return gradients_of((*call.spec.arrays, "state"), *(_joined(call, n, d[::-1]) for n, d in parts.items()), state)


def _sum(dS: Any, more: Any) -> Any:
    return more if dS is None else each(lambda a, b: a + b, dS, more)


def _at(call: Call, dstates: Any, at: int, piece: Piece) -> Any:
    """The cotangent of one position, as that of the states of the piece that it ends."""
    xp, batch = call.xp, len(call.batch)
    if not call.is_ragged:
        return each(lambda d: d[(slice(None),) * batch + (at, ...)], dstates)
    count = piece.last - piece.first

    def padded(d: Array) -> Array:
        one = d[at : at + 1, ...]
        return one if count == 1 else xp.concat([xp.zeros_like(one)] * (count - 1) + [one], axis=0)

    return each(padded, dstates)


def _at_begin(call: Call, state: Any, dstates: Any, at: int) -> Any:
    """The gradient of the initial states, with the cotangent of position 0."""
    xp, batch = call.xp, len(call.batch)
    if not call.is_ragged:
        return each(lambda S, d: S + xp.astype(d[(slice(None),) * batch + (at, ...)], S.dtype), state, dstates)
    return each(lambda S, d: xp.concat([S[:1, ...] + xp.astype(d[at : at + 1, ...], S.dtype), S[1:, ...]], axis=0),
                state, dstates)  # fmt: skip


def _joined(call: Call, name: str, parts: list[Array]) -> Any:
    """The gradient of an array from those of the pieces: along time, or their sum."""
    x, xp, time = getattr(call, name), call.xp, time_of(call, name)
    if x is None:
        return None
    if not parts:
        return call.library.give_back(xp.zeros_like(x))
    d = sum(parts[1:], parts[0]) if time is None else xp.concat(parts, axis=time)
    layout = LAYOUTS.get(call.options["layout"])
    if layout is not None:
        d = layout.leave(xp, d, call.axes[name], call.batch)
    return call.library.give_back(d)
