"""What a call and a pullback give: named tuples, which can be pickled and copied."""

from __future__ import annotations

import functools
from collections import namedtuple
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from .ground.namespace import Library, enter


class Result(NamedTuple):
    """out and the state after the last token; unpacks as a pair."""

    out: Any
    state: Any


def copied(library: Library, x: Any) -> Any:
    """An array of the caller's kind in memory of its own."""
    if x is None:
        return None
    return library.give_back(library.xp.asarray(enter("copied", {"x": x})[1]["x"], copy=True))


@functools.cache
def gradients_type(names: tuple[str, ...]) -> type:
    """The named tuple with these fields; one class a set of names."""
    kind = namedtuple("Gradients", names)
    kind.__reduce__ = lambda self: (gradients_of, (names, *self))  # type: ignore[method-assign]
    kind.__doc__ = f"Gradients by input name: {', '.join(names)}; None for what was not given."
    return kind


def gradients_of(names: Iterable[str], *values: Any) -> Any:
    """Gradients with these names and values; what a pickle calls."""
    kind: Callable[..., Any] = gradients_type(tuple(names))
    return kind(*values)
