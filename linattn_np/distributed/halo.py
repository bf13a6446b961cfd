"""Pieces of layers that read a few tokens back, such as short convolutions, over ranks.

The state that enters a rank are the last inputs before it, whatever came earlier: every rank sends the end of its
tokens, and backward the gradient of the inputs that it was sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from array_api_compat import device

from ..call.results import Result, gradients_of
from ..call.vjp import vjp
from ..ops.sequences import Sequences
from ..runtime.arrays import cast, enter
from .exchange import Place, exchanged
from .parts import Ranks
from .pieces import Piece, crossing

REFUSED = ("overwrite_state", "state_rows")


class Window:
    """A call of a piece with a state on this rank's tokens, and the inputs that enter it."""

    def __init__(self, fn: Any, ranks: Ranks, given: Mapping[str, Any]):
        name, piece = f"distributed.run of {fn.__name__}", fn.piece
        if "state" not in piece.axes:
            raise TypeError(f"distributed.run: fn is {fn.__name__}, expected a variant, or a piece with a state")
        for word in REFUSED:
            if given.get(word) is not None and given[word] is not False:
                raise ValueError(f"{name}: {word} is given, expected none: it is about states on another rank")
        if ranks.segment is not None:
            raise ValueError(f"{name}: segment is given, expected none: its bits depend on no segments")
        arrays = enter(name, {n: given[n] for n in piece.axes if given.get(n) is not None})[1]
        state, self.value = arrays.pop("state", None), next(iter(piece.axes))
        axes = {n: each.removeprefix("... ").rstrip("?") for n, each in piece.axes.items()}
        self.parts = ranks.parts(name, arrays, axes, self.value, state)
        self.fn, self._options = fn, {n: x for n, x in given.items() if n not in (*piece.axes, "return_state")}
        own, xp, x = self.parts.own, self.parts.tokens.xp, arrays[self.value]
        shape = piece.results(arrays | {"state": state, "return_state": True})[1][0]
        self.slots, self.sequences = shape[-2], Sequences(xp)
        lead = (1,) if self.parts.tokens.is_packed else self.parts.tokens.batch
        self.like = xp.zeros((*lead, *shape[-2:]), dtype=x.dtype if state is None else state.dtype, device=device(x))
        self.crossing = crossing(self.parts.pieces)
        self.before: dict[Place, Any] = {}  # what the sequences begin with
        if state is not None:
            self.before = {piece.place: self.parts.row(state, piece.sequence) for piece in own if piece.is_first}
        ends = {piece.place: self.end_of(piece) for piece in own if not piece.is_last}
        found = exchanged(xp, self.parts.comm, self.parts.pieces, self._goes_on, ends, self.like)
        each = [self.before.get(p.place) if p.is_first else found[p.sequence, p.number - 1] for p in own]
        some = any(S is not None for S in each)
        self.state = self.parts.tokens.joined([self.like if S is None else S for S in each]) if some else None

    def _goes_on(self, piece: Piece) -> bool:
        return piece.sequence in self.crossing and not piece.is_last

    def tokens_of(self, piece: Piece) -> Any:
        """The inputs of a piece."""
        return self.parts.tokens.arrays[self.value][..., piece.start : piece.stop, :]

    def end_of(self, piece: Piece) -> Any:
        """The last inputs of a piece that goes on."""
        if not piece.is_first and piece.stop - piece.start < self.slots:
            raise ValueError(
                f"{self.parts.name}: rank {self.parts.comm.rank} has {piece.stop - piece.start} tokens of a sequence "
                f"between other ranks, expected at least {self.slots}"
            )
        past = self.before.get(piece.place)
        x = cast(self.parts.tokens.xp, self.tokens_of(piece), self.like.dtype)
        return self.sequences.last(x, past, self.slots)

    def call(self, **more: Any) -> dict[str, Any]:
        """The keywords of fn on the tokens of this rank."""
        return self.parts.tokens.call(self.parts.own) | self._options | {"state": self.state} | more

    def of_all(self, states: Any, ends: Callable[[Piece], bool]) -> Any:
        """The states of all sequences, from those of the local call."""
        return self.parts.of_all(self.parts.by_piece(states), self.like, ends)


def run(fn: Callable[..., Any], ranks: Ranks, given: Mapping[str, Any]) -> Any:
    """The result of the call."""
    window = Window(fn, ranks, given)
    if not given.get("return_state", False):
        return fn(**window.call())
    out, end = fn(**window.call(return_state=True))
    return Result(out, window.of_all(end, lambda piece: piece.is_last))


def run_vjp(fn: Callable[..., Any], ranks: Ranks, given: Mapping[str, Any]) -> tuple[Any, Callable[..., Any]]:
    """(result, pullback)."""
    window = Window(fn, ranks, given)
    (out, end), pull = vjp(fn, **window.call(return_state=True))
    shape = tuple(out.shape)

    def pullback(dout: Any = None, dstate: Any = None) -> Any:
        """Gradients by input name, of this rank's arrays and of the state."""
        window.parts.check_dout(dout, dstate, shape)
        return _gradients(window, pull, dout, dstate)

    if not given.get("return_state", False):
        return out, pullback
    return Result(out, window.of_all(end, lambda piece: piece.is_last)), pullback


def _gradients(window: Window, pull: Callable[..., Any], dout: Any, dstate: Any) -> Any:
    """Gradients by input name: a piece that goes on gets that of its last inputs from the next rank."""
    parts, own, xp = window.parts, window.parts.own, window.parts.tokens.xp
    last = [parts.row(dstate, p.sequence) if p.is_last and dstate is not None else window.like for p in own]
    grads = pull(dout, None if dstate is None and dout is not None else parts.tokens.joined(last))._asdict()
    entered = {} if window.state is None else parts.by_piece(grads["state"])
    found = exchanged(
        xp, parts.comm, parts.pieces, lambda p: p.sequence in window.crossing and not p.is_first, entered, window.like
    )
    dx = grads[window.value]
    for piece in own:
        if not piece.is_last:
            d, dpast = window.sequences.last_vjp(found[piece.sequence, piece.number + 1], window.tokens_of(piece),
                                                 window.before.get(piece.place))  # fmt: skip
            row = dx[..., piece.start : piece.stop, :]
            each = [dx[..., : piece.start, :], row + cast(xp, d, row.dtype), dx[..., piece.stop :, :]]
            dx = xp.concat(each, axis=-2)
            if dpast is not None:
                entered[piece.place] = entered[piece.place] + dpast
    state = None
    if parts.state is not None:
        state = parts.of_all(entered, window.like, lambda piece: piece.is_first)
    return gradients_of(tuple(grads), *(grads | {window.value: dx, "state": state}).values())
