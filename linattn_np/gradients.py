"""Gradients: named tuples by the names of a variant's arrays, which can be pickled and copied."""

from __future__ import annotations

import functools
from collections import namedtuple
from collections.abc import Callable, Iterable
from typing import Any


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
