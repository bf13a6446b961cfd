"""Which backend computes a call, and why: a pure function of library, dtype, shape and options."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NamedTuple

from .values import shown

NAMES = ("reference", "chunks", "numba", "cuda")


class Later:
    """A module that is imported when something of it is first used."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(import_module(self._name), attribute)


class Backend(NamedTuple):
    """A backend of a room: `refuses(call)` is None where it covers the call, else the reason in words.

    `note` says why it is not taken unasked, where that is so; `how(call)` which of its own ways it takes.
    """

    name: str
    module: Any
    refuses: Callable[[Any], str | None]
    note: str = "covers the call too"
    how: Callable[[Any], str] | None = None


class Choice(NamedTuple):
    """The backend chosen, why, and why each other one was not."""

    backend: Backend
    reason: str
    others: dict[str, str]


def check_name(fn: str, wanted: Any) -> None:
    """Raise ValueError unless a backend, or none, is asked for by name."""
    if wanted is not None and not (isinstance(wanted, str) and wanted in NAMES):
        raise ValueError(f"{fn}: backend is {shown(wanted)}, expected None or one of {', '.join(map(repr, NAMES))}")


def choose(fn: str, wanted: str | None, candidates: Sequence[Backend], call: Any) -> Choice:
    """The wanted backend, else the first candidate (fastest first) that covers the call.

    Raises ValueError for an unknown name, or for a wanted backend that does not cover the call, with its reason.
    """
    check_name(fn, wanted)
    refused = {b.name: b.refuses(call) for b in candidates}
    refused |= {name: "there is no such path yet" for name in NAMES if name not in refused}
    if wanted is not None and refused[wanted] is not None:
        raise ValueError(f"{fn}: backend {wanted!r} does not cover this call: {refused[wanted]}")
    for b in candidates:
        if b.name == (wanted or b.name) and refused[b.name] is None:
            reason = "asked for" if wanted else "the path that is taken unasked"
            notes = {c.name: c.note for c in candidates}
            others = {n: why or notes[n] for n, why in refused.items() if n != b.name}
            return Choice(b, reason, others)
    raise ValueError(f"{fn}: no backend covers this call: {refused}")
