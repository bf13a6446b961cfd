"""The choice of a backend, with its reasons: a pure function of library, dtype, shape and options."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NamedTuple

from .values import is_word, shown

NAMES = ("reference", "chunks", "numba", "cuda")


class LazyModule:
    """A module that is imported on first use."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(import_module(self._name), attribute)


def any_width(call: Any) -> frozenset[str]:
    """The capabilities of a backend that implements no preprocessing itself but supports keys of any width."""
    return frozenset(("wide_keys",))


class Backend(NamedTuple):
    """A backend of a core: its module and its properties; `call` is the core's inputs and plan.

    module: `forward(x, plan, state)` and `backward(residuals, dout, dstate)`, and one function for each capability that
        is a function.
    unsupported_reason: why a call is not supported; None if it is.
    handles: the capabilities for a call: preprocessing steps that the backend implements, and functions of its module.
    note: why it is not the default for a call that it supports.
    describe: the algorithm that the backend uses for a call.
    form: (form, tokens of a chunk or None) of a call.
    forced: the plan of a call whose option `backend` names this one.
    """

    name: str
    module: Any
    unsupported_reason: Callable[[Any], str | None]
    form: Callable[[Any], tuple[str, int | None]]
    handles: Callable[[Any], frozenset[str]] = any_width
    note: str = "covers the call too"
    describe: Callable[[Any], str] | None = None
    forced: Callable[[Any], Any] | None = None


class Choice(NamedTuple):
    """The chosen backend, the reason, and the reason against each other one."""

    backend: Backend
    reason: str
    others: dict[str, str]


def choose(fn: str, wanted: str | None, candidates: Sequence[Backend], call: Any) -> Backend:
    """The wanted backend, else the first candidate (fastest first) that supports the call.

    Raises ValueError for an unknown name, or with the reason if the wanted backend does not support the call.
    """
    check_name(fn, wanted)
    if wanted is not None:
        candidates = [b for b in candidates if b.name == wanted]
        reason = candidates[0].unsupported_reason(call) if candidates else "there is no such path yet"
        if reason is not None:
            raise ValueError(f"{fn}: backend {wanted!r} does not cover this call: {reason}")
        return candidates[0]
    for b in candidates:
        if b.unsupported_reason(call) is None:
            return b
    reasons = {b.name: b.unsupported_reason(call) for b in candidates}
    raise ValueError(f"{fn}: no backend covers this call: {reasons}")


def check_name(fn: str, wanted: Any) -> None:
    """Raise ValueError unless `wanted` is None or the name of a backend."""
    if wanted is not None and not is_word(wanted, NAMES):
        raise ValueError(f"{fn}: backend is {shown(wanted)}, expected None or one of {', '.join(map(repr, NAMES))}")


def explain_choice(fn: str, wanted: str | None, candidates: Sequence[Backend], call: Any) -> Choice:
    """The choice of `choose`, with reasons."""
    chosen = choose(fn, wanted, candidates, call)
    others = dict.fromkeys(NAMES, "there is no such path yet")
    others |= {b.name: b.unsupported_reason(call) or b.note for b in candidates}
    others.pop(chosen.name)
    return Choice(chosen, "requested" if wanted else "the default path", others)
