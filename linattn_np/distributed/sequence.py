"""A variant over ranks that each hold a part of the tokens.

Forward: every rank sums up its tokens (`la.summary`), all summaries are exchanged, a left fold gives the state that
enters each rank, and the rank computes its outputs with it.

    S_0 -> S_1 = M_0 S_0 + U_0 -> S_2 = M_1 S_1 + U_1 -> ...

Backward, the mirror: R_r, the gradient of the state that enters rank r if nothing comes after the rank; all R are
exchanged, a fold from the right gives the gradient of the state that leaves each rank, and with it an ordinary
backward of the rank gives every gradient. No gradient passes through M.

    dS_r = M_r^T dS_{r+1} + R_r
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..call.binding import bind, normalise, spec_of
from ..call.foreign import mapped
from ..call.results import Result, gradients_of
from ..call.summary import summary
from ..call.vjp import vjp
from ..composition import Summary, added, after
from ..runtime.arrays import cast, enter, gradient_like
from ..runtime.values import shown
from .exchange import Place, exchanged
from .parts import Parts, Ranks
from .pieces import Piece, crossing

Pullback = Callable[..., Any]
REFUSED = ("overwrite_state", "state_rows", "fresh", "return_states_at", "reverse")


class Local:
    """A call of a variant on this rank's tokens, checked."""

    def __init__(self, fn: Callable[..., Any], ranks: Ranks, given: Mapping[str, Any]):
        spec = self.spec = spec_of("distributed.run", fn)
        name = f"distributed.run of {spec.name}"
        if not spec.composes:
            raise TypeError(
                f"distributed.run: fn is {spec.name}, whose states do not compose, expected a variant with a la.summary"
            )
        for word in REFUSED:
            if given.get(word) is not None and given[word] is not False:
                raise ValueError(f"{name}: {word} is given, expected none: it is about states on another rank")
        if given.get("layout", "time_first") != "time_first":
            raise ValueError(f"{name}: layout is {shown(given['layout'])}, expected 'time_first'")
        if given.get("causal") is False:
            raise ValueError(f"{name}: causal is False, expected True")
        bound, defaults = bind(spec, (), given)
        entered = enter(name, {n: x for n, x in bound.items() if hasattr(x, "ndim")})[1]
        arrays = {n: entered.get(n, x) for n, x in given.items() if n in spec.arrays}
        state = normalise(spec, "state", given.get("state"), defaults)
        axes = {n: a.axes for n, a in spec.arrays.items()}
        self.parts: Parts = ranks.parts(name, arrays, axes, spec.change.value, state)
        self.fn, self._defaults = fn, defaults
        self._options = {n: x for n, x in given.items() if n not in (*spec.arrays, "state", "return_state")}

    def call(self, state: Any, **more: Any) -> dict[str, Any]:
        """The keywords of fn on the pieces of this rank."""
        return self.parts.tokens.call(self.parts.own) | self._options | {"state": state} | more

    def summaries(self, pieces: Sequence[Piece]) -> list[Summary]:
        """Of each piece; without pieces that of no tokens, for its shapes."""
        found = summary(self.fn, **self.parts.tokens.call(pieces), **self._options)
        return self.parts.tokens.split(found, pieces or [Piece(0, 0, 0, 0, True)])

    def dstate(self, given: Any) -> Any:
        """A gradient of the state in the variant's form."""
        return normalise(self.spec, "dstate", given, self._defaults)


def run(fn: Callable[..., Any], ranks: Ranks, given: Mapping[str, Any]) -> Any:
    """The result of the call."""
    local = Local(fn, ranks, given)
    parts, entry = local.parts, Entry(local, whole=False)
    if not given.get("return_state", False):
        return parts.tokens.rows(fn(**local.call(entry.state)), parts.own)
    out, end = fn(**local.call(entry.state, return_state=True))
    return Result(parts.tokens.rows(out, parts.own), entry.of_all(end, lambda piece: piece.is_last))


def run_vjp(fn: Callable[..., Any], ranks: Ranks, given: Mapping[str, Any]) -> tuple[Any, Pullback]:
    """(result, pullback)."""
    local = Local(fn, ranks, given)
    parts, entry = local.parts, Entry(local, whole=True)
    (out, end), pull = vjp(fn, **local.call(entry.state, return_state=True))
    out = parts.tokens.rows(out, parts.own)
    shape = None if out is None else tuple(out.shape)

    def pullback(dout: Any = None, dstate: Any = None) -> Any:
        """Gradients by input name, of this rank's arrays and of the state."""
        parts.check_dout(dout, dstate, shape)
        return _gradients(local, entry, pull, parts.tokens.packed_rows(dout, parts.own), local.dstate(dstate))

    if not given.get("return_state", False):
        return out, pullback
    return Result(out, entry.of_all(end, lambda piece: piece.is_last)), pullback


def _gradients(local: Local, entry: Entry, pull: Pullback, dout: Any, dstate: Any) -> Any:
    """Gradients by input name."""
    spec, parts = local.spec, local.parts
    tokens, own, xp = parts.tokens, parts.own, parts.tokens.xp
    end = {} if dstate is None else {piece.sequence: parts.row(dstate, piece.sequence) for piece in own}
    leaving = {piece.place: end[piece.sequence] for piece in own if piece.is_last and end}
    if entry.is_linked:
        R = {} if entry.state is None else parts.by_piece(entry.pulled(pull, dout, leaving).state)
        leaving = entry.gradients(R, end)
    grads = entry.pulled(pull, dout, leaving)
    values = [tokens.rows(d, own) if tokens.has_time(n, tokens.arrays.get(n)) else d
              for n, d in zip(spec.arrays, grads, strict=False)]  # fmt: skip
    state = None
    if parts.state is not None:
        begin = entry.of_all(grads.state, lambda piece: piece.is_first)
        state = _mapped_two(lambda d, S: gradient_like(xp, d, S), begin, parts.state)
    return gradients_of((*spec.arrays, "state"), *values, state)


class Entry:
    """The states that enter the pieces of this rank, and their gradients backward.

    whole: whether sequences are followed beyond this rank, as a backward needs.
    """

    def __init__(self, local: Local, whole: bool):
        self._parts, self._crossing = local.parts, crossing(local.parts.pieces)
        own, xp = self._parts.own, self._parts.tokens.xp
        needed = [piece for piece in own if not piece.is_last]
        spans = local.summaries(needed) if needed else []
        if not needed and (self._crossing or self._parts.state is not None or not own):
            spans = local.summaries(own[:1] if self._crossing else [])  # others sum up their tokens at the same time
        self.like: Any = spans[0].offset if spans else None  # a state, for its shapes
        mine = {piece.place: span for piece, span in zip(needed, spans, strict=False)}
        found = exchanged(xp, local.parts.comm, local.parts.pieces, self._goes_on, mine, spans[0] if spans else None)
        last = {piece.sequence: piece.number for piece in own}
        self._chains = {n: Chain(xp, found, n, self._begin(n), None if whole else last[n]) for n in last}
        states = [self._chains[piece.sequence].states[piece.number] for piece in own]
        self.state: Any = self._joined(states) if any(S is not None for S in states) else None

    @property
    def is_linked(self) -> bool:
        """Whether the states of pieces depend on other pieces, here or on other ranks."""
        return bool(self._crossing) or any(len(chain.states) > 1 for chain in self._chains.values())

    def _goes_on(self, piece: Piece) -> bool:
        return piece.sequence in self._crossing and not piece.is_last

    def pulled(self, pull: Pullback, dout: Any, leaving: Mapping[Place, Any]) -> Any:
        """The local pullback; leaving: the gradients of the states after the pieces of this rank, if not zero."""
        each = [leaving.get(piece.place) for piece in self._parts.own]
        if dout is not None and all(d is None for d in each):
            return pull(dout, None)
        return pull(dout, self._joined(each))

    def gradients(self, R: Mapping[Place, Any], end: Mapping[int, Any]) -> dict[Place, Any]:
        """The gradients of the states after pieces, None where nothing comes after.   end: of sequences' last states.

        R: of the states before the pieces of this rank if nothing but `end` comes after them.
        """
        xp, comm, pieces = self._parts.tokens.xp, self._parts.comm, self._parts.pieces
        found = exchanged(
            xp, comm, pieces, lambda piece: piece.sequence in self._crossing and not piece.is_first, R, self.like
        )
        of: dict[int, dict[int, Any]] = {n: {} for n in self._chains}
        for (n, number), d in found.items():
            of.setdefault(n, {})[number] = d
        return {(n, number): d for n, chain in self._chains.items()
                for number, d in enumerate(chain.backward(of[n], end.get(n)))}  # fmt: skip

    def of_all(self, states: Any, ends: Callable[[Piece], bool]) -> Any:
        """The states of all sequences, from those of the local call."""
        return self._parts.of_all(self._parts.by_piece(states), self.like, ends)

    def _begin(self, n: int) -> Any:
        """The state before the first token of a sequence."""
        if self._parts.state is None:
            return None
        xp, own = self._parts.tokens.xp, self._parts.row(self._parts.state, n)
        return _mapped_two(lambda S, like: cast(xp, S, like.dtype), own, self.like)

    def _joined(self, states: Sequence[Any]) -> Any:
        """The states of this rank's pieces as those of a call, zeros for None."""
        zero: Any = mapped(self._parts.tokens.xp.zeros_like, next((S for S in states if S is not None), self.like))
        return self._parts.tokens.joined([zero if S is None else S for S in states])


class Chain:
    """The states before the pieces of one sequence, a left fold; those of later ranks' pieces too, for the backward."""

    def __init__(self, xp: Any, spans: Mapping[Place, Summary], sequence: int, state: Any, until: int | None):
        self.states, self._vjps = [state], list[Callable[[Any], Any]]()
        while (place := (sequence, len(self._vjps))) in spans and place[1] != until:
            before = mapped(xp.zeros_like, spans[place].offset) if self.states[-1] is None else self.states[-1]
            S, step_vjp = after(xp, spans[place], before)
            self.states.append(S)
            self._vjps.append(step_vjp)

    def backward(self, R: Mapping[int, Any], d: Any) -> list[Any]:
        """The gradients of the states after the pieces; d: after the last one.   R by the number of the piece."""
        found = [d]
        for n in reversed(range(1, len(self.states))):
            d = R[n] if n == len(self._vjps) else added(R[n], self._vjps[n](d)[1])
            found.append(d)
        return found[::-1]


def _mapped_two(f: Callable[[Any, Any], Any], x: Any, y: Any) -> Any:
    """f of two arrays, or of the parts of two states."""
    return type(y)(*map(f, x, y)) if isinstance(y, tuple) else f(x, y)
