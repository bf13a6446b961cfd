"""Calls that are computed piece by piece along their tokens: states at positions, and fewer queries than tokens.

Each piece is a call of its own, which begins with the state that the piece before it returned:

    positions       a piece ends at each of them
    fewer queries   causal queries are those of the last tokens; pieces before them write without reading

The transpose is the pieces' pullbacks in reverse order. `Piece` describes the cuts; `forward` and `vjp` follow them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

from ..runtime import shapes
from ..runtime.arrays import Array, as_computed, dtype_name, is_mutable
from ..runtime.shapes import flatten, unflatten
from ..spec import Call
from .binding import has_fewer_queries, initial_state
from .layouts import LAYOUTS
from .results import Result, StatesResult

Run = Callable[[Any, dict[str, Any]], Any]  # (spec, keywords) -> the result of a piece


class Piece(NamedTuple):
    """Tokens start..stop of the call, its queries, and the rows of its sequences."""

    start: int
    stop: int
    queries: slice | None  # None: it writes without reading
    first: int  # of its sequences
    last: int  # one past them
    offsets: list[int] | None  # of a ragged batch, from `start` on
    ends: bool  # it holds the last token of its sequences


def cut(call: Call) -> tuple[list[Piece], list[int]]:
    """(pieces, the piece at whose end each position is)."""
    sizes, options = call.sizes, call.options
    T, offsets = sizes["T"], options["cu_seqlens"]
    positions = options["return_states_at"] or []
    Tq = sizes.get("Tq", T)
    late = T - Tq if call.plan.causal else T  # the first token that has a query
    has_queries = call.spec.change.query is None or getattr(call, call.spec.change.query) is not None
    cuts = sorted({*positions, late} - {0, T})
    pieces, at = [], {}
    for start, stop, first, last in _ranges(T, offsets, cuts):
        queries = slice(start - late, stop - late) if has_queries and start >= late and call.plan.causal else None
        own = None if offsets is None else [min(max(n, start), stop) - start for n in offsets[first : last + 1]]
        ends = stop == T if offsets is None else stop == offsets[last]
        pieces.append(Piece(start, stop, queries, first, last, own, ends))
        if stop > start:
            at[stop] = len(pieces) - 1
    if has_queries and (not call.plan.causal or Tq == 0 < T):  # all queries read the final state
        pieces.append(Piece(T, T, slice(0, Tq), 0, 1, None, True))
    return pieces, [at.get(n, -1) for n in positions]


def with_all_queries(call: Call) -> Call:
    """The call with zeros for the queries of the first tokens: what `explain` counts."""
    if not has_fewer_queries(call):
        return call
    name = str(call.spec.change.query)
    q, shape = getattr(call, name), [*getattr(call, name).shape]
    shape[time_of(call, name)] = call.sizes["T"]
    return call.changed(**{name: call.xp.zeros(tuple(shape), dtype=q.dtype)})


def _ranges(T: int, offsets: list[int] | None, cuts: list[int]) -> list[tuple[int, int, int, int]]:
    """(start, stop, first sequence, one past the last) of every piece.

    Sequences that are not cut are taken together; a piece of a cut sequence is alone.
    """
    if offsets is None:
        return [(a, b, 0, 1) for a, b in pairwise([0, *cuts, T])]
    found, first = [], 0
    for n, (start, stop) in enumerate(pairwise(offsets)):
        inside = [c for c in cuts if start < c < stop]
        if inside:
            if first < n:
                found.append((offsets[first], start, first, n))
            found += [(a, b, n, n + 1) for a, b in pairwise([start, *inside, stop])]
            first = n + 1
        elif stop > start and stop in (*cuts, T):
            found.append((offsets[first], stop, first, n + 1))
            first = n + 1
    if first < len(offsets) - 1:  # empty sequences at the end
        found.append((offsets[first], T, first, len(offsets) - 1))
    return found


class Computed(NamedTuple):
    """The pieces of a call, with what each of them computed."""

    pieces: list[Piece]
    at: list[int]  # of each position the piece at whose end it is, -1: the initial state
    begin: Any  # the initial state
    given: list[dict[str, Array]]  # the arrays of each piece by name
    results: list[Any]  # what `run` returned


def compute(call: Call, keywords: Mapping[str, Any], run: Run) -> tuple[Computed, Any, list[Any]]:
    """(pieces with the results of `run`, out in time-first layout, the state at the end of each piece).

    run(spec, keywords) returns (an (out, state), anything).
    """
    pieces, at = cut(call)
    options, begin = _options(call, keywords), _begin(call, keywords, run)
    buffer, found = Rows(call), Computed(pieces, at, begin, [], [])
    ends: list[Any] = []
    for n, piece in enumerate(pieces):
        given = {name: _tokens(call, name, piece) for name in call.spec.arrays}
        state = ends[-1] if continues(pieces, n) else rows_of(call, begin, piece)
        own = {} if piece.offsets is None else {"cu_seqlens": piece.offsets}
        result = run(call.spec, {**given, **options, **own, "state": state, "return_state": True})
        found.given.append(given)
        found.results.append(result)
        out, end = result[0]
        buffer.put(piece.queries, out)
        ends.append(end)
    return found, buffer.done(), ends


def continues(pieces: list[Piece], n: int) -> bool:
    """Whether a piece begins with the state at the end of the piece before it."""
    return n > 0 and (pieces[n].offsets is None or not pieces[n - 1].ends)


def _options(call: Call, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """The options of every piece."""
    spec = call.spec
    names = {*spec.options, "scale", "chunk_size", "chunk_states", "precision", "num_threads", "backend"}
    options = {n: value for n, value in keywords.items() if n in names}
    rules = {n: call.options[option] for n, (option, _) in spec.rules.items()}
    return options | {n: rule for n, rule in rules.items() if getattr(call, n) is None}


def _begin(call: Call, keywords: Mapping[str, Any], run: Run) -> Any:
    """The public initial state, one row per sequence: the caller's, or that of a call without tokens."""
    state = call.given_state
    if state is None:
        none = Piece(0, 0, None, 0, 1, None, True)
        given = {name: _tokens(call, name, none) for name in call.spec.arrays}
        own = {"cu_seqlens": [0] * (call.sizes["sequences"] + 1)} if call.is_ragged else {}
        return run(call.spec, {**given, **_options(call, keywords), **own, "return_state": True})[0][1]
    return initial_state(call.spec, call.xp, call.sizes, state, call.rows)


def _tokens(call: Call, name: str, piece: Piece) -> Any:
    """The tokens of a piece, or its queries, of an array; what has no tokens as it is."""
    x, time = getattr(call, name), time_of(call, name)
    if name == call.spec.change.query:
        if x is None or piece.queries is None:
            return None
        return x[(slice(None),) * time + (piece.queries, ...)]
    return x if x is None or time is None else x[(slice(None),) * time + (slice(piece.start, piece.stop), ...)]


def time_of(call: Call, name: str) -> Any:
    """The time axis of an array in time-first layout; None for an array without one, or that is not given."""
    x = getattr(call, name)
    return None if x is None else shapes.time_axis(call.axes[name], x.ndim, call.batch)


def rows_of(call: Call, state: Any, piece: Piece) -> Any:
    """The states of the sequences of a piece."""
    return state if not call.is_ragged else each(lambda S: S[piece.first : piece.last, ...], state)


def each(f: Callable[..., Any], *states: Any) -> Any:
    """f of every part of states."""
    parts = [flatten("", S).values() for S in states]
    return unflatten(states[0], [f(*one) for one in zip(*parts, strict=True)])


class Rows:
    """Outputs of pieces, assembled: in place where the library allows it."""

    def __init__(self, call: Call):
        self._call, self._count, self._parts = call, call.spec.row_axes, list[Array]()
        self._out: Any = None

    def put(self, queries: slice | None, out: Array | None) -> None:
        """Take the outputs of these queries."""
        if out is None or queries is None:
            return
        sizes, xp = self._call.sizes, self._call.plan.xp
        if not is_mutable(xp):
            self._parts.append(out)
            return
        if self._out is None:
            T = sizes.get("Tq", sizes["T"])
            at, where = out.ndim - self._count, self._call.library.device
            shape = (*out.shape[: at - 1], T, *out.shape[at:])
            self._out = xp.empty(shape, dtype=out.dtype, device=where)
        self._out[(..., queries, *(slice(None),) * self._count)] = out

    def done(self) -> Array | None:
        """All outputs."""
        if self._parts:
            return self._call.plan.xp.concat(self._parts, axis=-1 - self._count)
        return self._out


def states_at(call: Call, found: Computed, ends: list[Any]) -> Any:
    """The states at the positions: (..., n, H, K, V), of a ragged batch (n, H, K, V)."""
    xp, axis = call.xp, 0 if call.is_ragged else len(call.batch)

    def row(n: int) -> Any:
        """The state of the sequence that the position is in, with the axis of the positions."""
        if call.is_ragged:
            return each(lambda S: S[:1, ...] if n < 0 else S[-1:, ...], found.begin if n < 0 else ends[n])
        return each(lambda S: xp.expand_dims(S, axis=axis), found.begin if n < 0 else ends[n])

    rows = [row(n) for n in found.at]
    if not rows:
        none = (slice(None),) * axis + (slice(0, 0), ...)
        return each(lambda S: xp.asarray(S[none], copy=True), row(-1))
    wide = lambda S: S if "int" in dtype_name(S) else as_computed(xp, S, call.dtype)  # noqa: E731
    return each(lambda *parts: xp.concat([wide(S) for S in parts], axis=axis), *rows)


def end_of(call: Call, found: Computed, ends: list[Any]) -> Any:
    """The public final state."""
    if not call.is_ragged:
        return ends[-1]
    last = [S for piece, S in zip(found.pieces, ends, strict=True) if piece.ends]
    return each(lambda *parts: call.xp.concat(parts, axis=0), *last)


def forward(call: Call, keywords: Mapping[str, Any], run: Run, final: Callable[..., Any]) -> Any:
    """The public result; final(call, S, given) makes a part of the public final state."""
    found, out, ends = compute(call, keywords, run)
    end = None
    if call.options["overwrite_state"] and call.spec.grows and call.given_state is not None:
        end = _of_its_slots(call, keywords, run, found.begin)
    return finished(call, found, out, ends, final, end)


def _of_its_slots(call: Call, keywords: Mapping[str, Any], run: Run, begin: Any) -> Any:
    """The final state where it is a cache that is overwritten: all tokens written into a copy, which gains no slots."""
    sizes, offsets = call.sizes, call.options["cu_seqlens"]
    whole = Piece(0, sizes["T"], None, 0, 1 if offsets is None else len(offsets) - 1, None, True)
    given = {name: _tokens(call, name, whole) for name in call.spec.arrays}
    own = {"state": each(lambda S: call.xp.asarray(S, copy=True), begin), "overwrite_state": True}
    own |= {} if offsets is None else {"cu_seqlens": offsets}
    return run(call.spec, {**given, **_options(call, keywords), **own, "return_state": True})[0][1]


def finished(call: Call, found: Computed, out: Any, ends: list[Any], final: Callable[..., Any], end: Any = None) -> Any:
    """The public result; end: the final state, if it is not that of the pieces."""
    options, back = call.options, call.library.give_back
    states = None if options["return_states_at"] is None else each(back, states_at(call, found, ends))
    if out is not None:
        layout = LAYOUTS.get(options["layout"])
        out = back(out if layout is None else layout.leave_rows(call.xp, out, call.spec.row_axes))
    if options["return_state"] or options["overwrite_state"] or (states is None and out is None):
        end = end_of(call, found, ends) if end is None else end
        given = each(lambda S: None, end) if call.given_state is None else call.given_state
        end = each(lambda S, own: final(call, S, own), end, given)
    if states is not None:
        return StatesResult(out, end if options["return_state"] else None, states)
    return Result(out, end) if out is None or options["return_state"] else out
