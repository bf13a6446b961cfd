"""A variant over ranks whose kernels ask for the state that enters them: one pass over the tokens.

They sum up their segments before they compute outputs. In between the summary of the rank is exchanged, backward the
gradient of the state before it; a call on one rank has no exchange, and no other difference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..call import neighbours
from ..composition import Factors, Summary, after
from ..runtime.arrays import cast, is_cupy
from .entry import Entry
from .local import Local

MOST = 1024
_made = set[Any]()  # calls that were made before: their kernels are loaded


class Between:
    """The ranks around this one, as kernels see them.   end: the gradient of the last state, by sequence."""

    def __init__(self, local: Local):
        self._local, self.end = local, dict[int, Any]()
        self.entry: Entry | None = None
        self._span: Any = None  # of this rank

    def state(self, transfer: Any, offset: Any) -> Any:
        """The state that enters this rank."""
        if self.entry is None:  # else a backward runs the forward again
            own = Factors(transfer) if self._local.spec.transfers == "factors" else transfer
            self._span = Summary(own, offset)
            self.entry = Entry(self._local, spans=[self._span])
        return self.entry.state

    def gradient(self, dstate: Any) -> Any:
        """That of the state after this rank.   dstate: that of the state before it, from this rank's outputs alone."""
        (own,), xp = self._local.parts.own, self._local.parts.tokens.xp
        if own.is_last and (end := self.end.get(own.sequence)) is not None:
            _, span_vjp = after(xp, self._span, xp.zeros_like(dstate))
            dstate = dstate + span_vjp(cast(xp, end, dstate.dtype))[1]
        return self.entry.gradients({own.place: dstate}, self.end)[own.place]  # type: ignore[union-attr]


def prepared(local: Local, gradients: bool) -> Any:
    """The checked call of kernels that ask for their state; None where there are none, or segments of fixed length."""
    parts = local.parts
    plain = parts.comm.size > 1 and parts.segment is None and not parts.tokens.is_packed
    if not plain or not is_cupy(parts.tokens.xp):
        return None
    found = neighbours.prepared(local.spec, local.call(parts.state, return_state=True), gradients)
    if found is not None:
        _wait_late(local, f"forward {gradients}")
    return found


def run(local: Local, call: Any) -> tuple[Any, Any, Entry]:
    """(out, the state after the tokens of this rank, the states between ranks)."""
    between, (checked, x) = Between(local), call
    out, end = neighbours.run(checked, x, between)
    return out, end, between.entry  # type: ignore[return-value]


def run_vjp(local: Local, call: Any) -> tuple[Any, Any, Entry, Callable[..., Any]]:
    """The same, and pull(dout, end): the gradients of a call from those of its outputs, and of last states."""
    between, (checked, x), keywords = Between(local), call, local.call(local.parts.state, return_state=True)
    (out, state), pullback = neighbours.run_vjp(checked, x, between, keywords)
    between.entry.follow()  # type: ignore[union-attr]  # while kernels compute the outputs

    def pull(dout: Any, end: dict[int, Any]) -> Any:
        between.end = end
        _wait_late(local, f"backward {bool(end)}")
        return pullback(local.parts.tokens.xp.zeros_like(out) if dout is None else dout)

    return out, state, between.entry, pull  # type: ignore[return-value]


def _wait_late(local: Local, what: str) -> None:
    """Exchanges are waited for at the end of a call, but at once in the first one of its kind: it loads kernels.

    For that the driver may wait for the device, which waits for a rank that may be gone.
    """
    given = ((n, str(x.dtype), x.shape) for n, x in local.parts.tokens.arrays.items() if hasattr(x, "shape"))
    kind = local.spec.name, what, local.parts.state is None, *given
    if len(_made) >= MOST:
        _made.clear()
    local.parts.comm.is_late = kind in _made
    _made.add(kind)
