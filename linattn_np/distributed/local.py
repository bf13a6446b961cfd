"""A call of a variant on this rank's tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..call.binding import bind, normalise, spec_of
from ..call.summary import summary
from ..composition import Summary
from ..runtime.arrays import enter
from ..runtime.values import shown
from .parts import Parts, Ranks
from .pieces import Piece

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
