"""The states that enter the pieces of this rank: summaries of all ranks, exchanged and folded from the left.

S_0 -> S_1 = M_0 S_0 + U_0 -> S_2 = M_1 S_1 + U_1 -> ...              dS_r = M_r^T dS_{r+1} + R_r
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..call.foreign import mapped
from ..composition import Summary, added, after
from ..runtime.arrays import cast
from .exchange import Place, exchanged
from .local import Local
from .pieces import Piece, crossing

Pullback = Callable[..., Any]


class Entry:
    """The states that enter the pieces of this rank, and their gradients backward.   spans: summaries of the pieces."""

    def __init__(self, local: Local, spans: Sequence[Summary] | None = None):
        self._parts, self._crossing = local.parts, crossing(local.parts.pieces)
        own, xp = self._parts.own, self._parts.tokens.xp
        needed = [piece for piece in own if not piece.is_last]
        if spans is None:
            spans = local.summaries(needed) if needed else []
            if not needed and (self._crossing or self._parts.state is not None or not own):
                spans = local.summaries(own[:1] if self._crossing else [])  # others sum up theirs at the same time
        self.like: Any = spans[0].offset if spans else None  # a state, for its shapes
        mine = {piece.place: span for piece, span in zip(needed, spans, strict=False)}
        found = exchanged(xp, local.parts.comm, local.parts.pieces, self._goes_on, mine, spans[0] if spans else None)
        last = {piece.sequence: piece.number for piece in own}
        self._chains = {n: Chain(xp, found, n, self._begin(n), last[n]) for n in last}
        states = [self._chains[piece.sequence].states[piece.number] for piece in own]
        self.state: Any = self._joined(states) if any(S is not None for S in states) else None

    def follow(self) -> None:
        """Follow the sequences beyond this rank, as gradients need; early, while a GPU is busy."""
        for chain in self._chains.values():
            chain.follow()

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
        self.follow()
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
        return mapped_two(lambda S, like: cast(xp, S, like.dtype), own, self.like)

    def _joined(self, states: Sequence[Any]) -> Any:
        """The states of this rank's pieces as those of a call, zeros for None."""
        zero: Any = mapped(self._parts.tokens.xp.zeros_like, next((S for S in states if S is not None), self.like))
        return self._parts.tokens.joined([zero if S is None else S for S in states])


class Chain:
    """The states before the pieces of one sequence, a left fold: up to piece `until`, then those of later ranks."""

    def __init__(self, xp: Any, spans: Mapping[Place, Summary], sequence: int, state: Any, until: int):
        self.states, self._vjps = [state], list[Callable[[Any], Any]]()
        self._xp, self._spans, self._sequence = xp, spans, sequence
        self.follow(until)

    def follow(self, until: int | None = None) -> None:
        """Go on up to a piece; None: as far as pieces have summaries."""
        xp, spans = self._xp, self._spans
        while (place := (self._sequence, len(self._vjps))) in spans and place[1] != until:
            span, before = spans[place], self.states[-1]
            S, step_vjp = _from_zeros(xp, span) if before is None else after(xp, span, before)
            self.states.append(S)
            self._vjps.append(step_vjp)

    def backward(self, R: Mapping[int, Any], d: Any) -> list[Any]:
        """The gradients of the states after the pieces; d: after the last one.   R by the number of the piece."""
        found = [d]
        for n in reversed(range(1, len(self.states))):
            d = R[n] if n == len(self._vjps) else added(R[n], self._vjps[n](d)[1])
            found.append(d)
        return found[::-1]


def _from_zeros(xp: Any, span: Summary) -> tuple[Any, Pullback]:
    """`after` of a state of zeros."""
    if isinstance(span.offset, tuple):
        return after(xp, span, mapped(xp.zeros_like, span.offset))
    return span.offset, lambda d: after(xp, span, xp.zeros_like(span.offset))[1](d)


def mapped_two(f: Callable[[Any, Any], Any], x: Any, y: Any) -> Any:
    """f of two arrays, or of the parts of two states."""
    return type(y)(*map(f, x, y)) if isinstance(y, tuple) else f(x, y)
