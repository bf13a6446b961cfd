"""A call on this rank's tokens: its pieces, and the states of all sequences from the ranks that have them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ..call.foreign import mapped
from ..runtime.shapes import check_offsets
from ..runtime.values import is_whole, shown
from .comm import Comm, Waiting
from .exchange import Place, exchanged
from .pieces import Piece, Pieces, check_lengths, cut, whole
from .tokens import Tokens


class Parts(NamedTuple):
    """A call on this rank's tokens."""

    name: str  # of the function in errors
    comm: Waiting
    tokens: Tokens
    pieces: Pieces
    state: Any  # before the first token of all ranks
    segment: int | None = None  # tokens of a segment, the same on any number of ranks

    @property
    def own(self) -> list[Piece]:
        return self.pieces[self.comm.rank]

    def row(self, states: Any, n: int) -> Any:
        """The state of one sequence."""
        return mapped(lambda S: S[n : n + 1, ...], states) if self.tokens.is_packed else states

    def by_piece(self, states: Any) -> dict[Place, Any]:
        """The states of a local call by the place of the piece."""
        each = self.tokens.split(states, self.own)
        return {piece.place: S for piece, S in zip(self.own, each, strict=True)}

    def of_all(self, own: Mapping[Place, Any], like: Any, ends: Callable[[Piece], bool]) -> Any:
        """The states of all sequences: those of the pieces at one of their ends.   like: a state, if there are none."""
        found = exchanged(self.tokens.xp, self.comm, self.pieces, ends, own, next(iter(own.values()), like))
        states = [found[place] for place in sorted(p.place for each in self.pieces for p in each if ends(p))]
        return self.tokens.joined(states) if self.tokens.is_packed else states[0]

    def check_dout(self, dout: Any, dstate: Any, shape: tuple[int, ...] | None) -> None:
        """Raise TypeError or ValueError for gradients of outputs of another shape, or none at all."""
        if dout is None and dstate is None:
            raise TypeError(f"{self.name}: the pullback got neither dout nor dstate, expected at least one")
        if dout is not None and tuple(dout.shape) != shape:
            raise ValueError(f"{self.name}: dout has shape {tuple(dout.shape)}, expected {shape}")


class Ranks(NamedTuple):
    """How the tokens lie on ranks: the options of a call that are not those of its function."""

    comm: Comm
    lengths: Any = None
    segment: Any = None
    cu_seqlens: Any = None

    def parts(self, name: str, arrays: dict[str, Any], axes: Mapping[str, str], value: str, state: Any) -> Parts:
        """The checked call."""
        comm, segment, offsets = self.comm, self.segment, self.cu_seqlens
        if segment is not None and not is_whole(segment):
            raise ValueError(f"{name}: segment is {shown(segment)}, expected None or a whole number from 1")
        tokens = Tokens(arrays, axes, value, offsets is not None)
        every = check_lengths(name, self.lengths, tokens.T, comm.rank, comm.size)
        if offsets is not None:
            offsets = check_offsets(name, offsets, {"...": tokens.batch, "T": sum(every)})
        if offsets is None and segment is None:
            pieces = whole(tokens.T, comm.size)
        else:
            pieces = cut(name, offsets or [0, sum(every)], every, segment)
        return Parts(name, Waiting(comm), tokens, pieces, state, segment)
