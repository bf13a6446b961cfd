"""A variant over ranks that each hold a part of the tokens.

Forward: every rank sums up its tokens (`la.summary`), all summaries are exchanged, a left fold gives the state that
enters each rank, and the rank computes its outputs with it.

Backward, the mirror: R_r, the gradient of the state that enters rank r if nothing comes after the rank; all R are
exchanged, a fold from the right gives the gradient of the state that leaves each rank, and with it an ordinary
backward of the rank gives every gradient. No gradient passes through a transfer.

Kernels that sum up their tokens before they compute outputs do both in one pass (between.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..call.results import Result, gradients_of
from ..call.vjp import vjp
from ..runtime.arrays import gradient_like
from . import between
from .entry import Entry, mapped_two
from .local import Local
from .parts import Ranks

Pullback = Callable[..., Any]


def run(fn: Callable[..., Any], ranks: Ranks, given: Mapping[str, Any]) -> Any:
    """The result of the call."""
    local = Local(fn, ranks, given)
    parts, returns = local.parts, given.get("return_state", False)
    if (call := between.prepared(local, gradients=False)) is not None:
        out, end, entry = between.run(local, call)
    else:
        entry = Entry(local)
        if not returns:
            return parts.tokens.rows(fn(**local.call(entry.state)), parts.own)
        out, end = fn(**local.call(entry.state, return_state=True))
    states = entry.of_all(end, lambda piece: piece.is_last) if returns else None
    parts.comm.wait()
    out = parts.tokens.rows(out, parts.own)
    return Result(out, states) if returns else out


def run_vjp(fn: Callable[..., Any], ranks: Ranks, given: Mapping[str, Any]) -> tuple[Any, Pullback]:
    """(result, pullback)."""
    local = Local(fn, ranks, given)
    parts, call = local.parts, between.prepared(local, gradients=True)
    out, end, entry, pull = _in_two(local) if call is None else between.run_vjp(local, call)
    out = parts.tokens.rows(out, parts.own)
    shape = None if out is None else tuple(out.shape)

    def pullback(dout: Any = None, dstate: Any = None) -> Any:
        """Gradients by input name, of this rank's arrays and of the state."""
        parts.check_dout(dout, dstate, shape)
        dstate = local.dstate(dstate)
        ends = {} if dstate is None else {piece.sequence: parts.row(dstate, piece.sequence) for piece in parts.own}
        found = _public(local, entry, pull(parts.tokens.packed_rows(dout, parts.own), ends))
        parts.comm.wait()
        return found

    states = entry.of_all(end, lambda piece: piece.is_last) if given.get("return_state", False) else None
    parts.comm.wait()
    return (out if states is None else Result(out, states)), pullback


def _in_two(local: Local) -> tuple[Any, Any, Entry, Pullback]:
    """(out, the states after the pieces, those before them, pull(dout, gradients of last states)): two passes."""
    entry, own = Entry(local), local.parts.own
    entry.follow()
    (out, end), pullback = vjp(local.fn, **local.call(entry.state, return_state=True))

    def pull(dout: Any, ends: Mapping[int, Any]) -> Any:
        leaving = {piece.place: ends[piece.sequence] for piece in own if piece.is_last and ends}
        if entry.is_linked:
            R = {} if entry.state is None else local.parts.by_piece(entry.pulled(pullback, dout, leaving).state)
            leaving = entry.gradients(R, ends)
        return entry.pulled(pullback, dout, leaving)

    return out, end, entry, pull


def _public(local: Local, entry: Entry, grads: Any) -> Any:
    """Gradients by input name from those of the local call."""
    spec, parts = local.spec, local.parts
    tokens, own, xp = parts.tokens, parts.own, parts.tokens.xp
    values = [tokens.rows(d, own) if tokens.has_time(n, tokens.arrays.get(n)) else d
              for n, d in zip(spec.arrays, grads, strict=False)]  # fmt: skip
    state = None
    if parts.state is not None:
        begin = entry.of_all(grads.state, lambda piece: piece.is_first)
        state = mapped_two(lambda d, S: gradient_like(xp, d, S), begin, parts.state)
    return gradients_of((*spec.arrays, "state"), *values, state)
