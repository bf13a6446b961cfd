"""step: one token without a time axis."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from .binding import spec_of
from .dispatch import result_of
from .layouts import ONE_TOKEN
from .vjp import vjp_of

Options = TypeVar("Options", bound=Mapping[str, Any])
# options that speak of a time axis
WITHOUT = frozenset(("cu_seqlens", "layout", "chunk_size", "return_states_at", "reverse"))


def step(fn: Callable[..., Any], /, *arrays: Any, **options: Any) -> Any:
    """One token: fn on arrays without a time axis, with the same state.

    The axes of each array are those of fn without T: q (..., H, K), beta (..., H), micro-steps (..., n, H, K);
    constants of the head are as they are. The result is that of fn on one token, out (..., H, V) or (out, state).
    Filters too: x (..., K), d (..., V). Options are those of fn, except cu_seqlens, layout,
    chunk_size, return_states_at and reverse. la.vjp(la.step, fn, *arrays, **options) gives
    gradients without a time axis.

    Raises TypeError if fn is not a variant of this library or for those options, and every error of fn.
    """
    if (rule := getattr(fn, "step", None)) is not None:
        return rule(arrays, without_time(options))
    return result_of(*_one_token(fn, arrays, options))


def _step_vjp(arrays: tuple[Any, ...], options: Mapping[str, Any]) -> tuple[Any, Callable[..., Any]]:
    """The rule of la.vjp: arrays begins with fn."""
    if not arrays:
        raise TypeError("step: fn is missing, expected a variant of linattn_np and its arrays")
    fn, *rest = arrays
    if (rule := getattr(fn, "step_vjp", None)) is not None:
        return rule(tuple(rest), without_time(options))
    return vjp_of(*_one_token(fn, tuple(rest), dict(options)))


def _one_token(fn: Any, arrays: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, tuple[Any, ...], Any]:
    """(spec, arrays, options with the layout) of a step."""
    spec = getattr(fn, "spec", None) or spec_of("step", fn)
    without_time(options)["layout"] = ONE_TOKEN
    return spec, arrays, options


def without_time(options: Options) -> Options:
    """The options.   Raises TypeError for one that speaks of a time axis."""
    if not WITHOUT.isdisjoint(options):
        name = next(n for n in options if n in WITHOUT)
        raise TypeError(f"step: {name} was given, expected none: a step has one token per sequence and no time axis")
    return options


step.vjp = _step_vjp  # type: ignore[attr-defined]
