"""A state as its parts: most variants have one array, some a named tuple of them."""

from __future__ import annotations

from typing import Any

from .card import Card


def pair(card: Card, name: str, state: Any, options: dict[str, Any]) -> Any:
    """A state as the variant takes it: one array, or its named tuple from any tuple as long."""
    kind = card.state(options)
    if not isinstance(state, tuple):
        return state
    if kind is None:
        raise TypeError(f"{card.name}: {name} is a {type(state).__qualname__}, expected one array (..., H, K, V)")
    if len(state) != len(kind._fields) or any(S is None for S in state):
        count = {2: "two", 3: "three"}[len(kind._fields)]
        raise TypeError(f"{card.name}: {name} is a {type(state).__qualname__} of {len(state)}, "
                        f"expected {count} arrays ({', '.join(kind._fields)}) as a {kind.__name__}")
    return kind(*state)


def parts(name: str, state: Any) -> dict[str, Any]:
    """The arrays of a state under their names."""
    if not isinstance(state, tuple):
        return {name: state}
    fields: Any = state  # a named tuple
    return {f"{name}.{n}": S for n, S in fields._asdict().items()}


def whole(like: Any, each: list[Any]) -> Any:
    """The transpose of parts."""
    return type(like)(*each) if isinstance(like, tuple) else each[0]
