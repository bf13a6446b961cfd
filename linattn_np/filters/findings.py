"""The findings of la.check about the signals, the rates and the state of a filter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

from ..call.findings import Finding
from ..runtime.arrays import Array
from .arguments import Filter, Signals, first_of, parts
from .gradient import strengths


def check(own: Filter, arrays: tuple[Any, ...], keywords: Mapping[str, Any]) -> list[Finding]:
    """The findings about a call of the filter."""
    s = own.enter(arrays, keywords)
    each = {"x": s.x, "d": s.d, **({} if s.q is None else {"q": s.q}), **parts(own, s.state)}
    found = [one for name, y in each.items() if (one := _not_finite(s, name, y))]
    if not found and prod(s.rate.shape):
        found += _of_rates(s, own)
    *_, T, K = s.x.shape
    if K > T > 1:
        found.append(
            Finding("x", f"has {T} tokens of {K} inputs: if time is its last axis, pass x.swapaxes(-1, -2)", False)
        )
    return found


def _not_finite(s: Signals, name: str, y: Array) -> Finding | None:
    """NaN or inf in an array."""
    wrong = ~s.xp.isfinite(y)
    count = int(s.xp.sum(s.xp.astype(wrong, s.xp.int8)))  # in the library's default integers
    if not count:
        return None
    return Finding(name, f"is NaN or inf at {count} of {prod(y.shape)} places, first at {first_of(s.xp, wrong)}", True)


def _of_rates(s: Signals, own: Filter) -> Iterator[Finding]:
    """Steps that grow, rates that learn nothing, memories shorter than the number of weights."""
    xp, K, name = s.xp, s.x.shape[-1], own.rate
    largest = float(xp.max(s.rate))
    if (window := s.numbers.get("window", K)) < K:
        yield Finding("window", f"is {window}: fewer tokens than the {K} inputs that the weights are fitted to", False)
    if own.forgets:
        if (tokens := 1 / (1 - largest) if largest < 1 else K) < K:
            yield Finding(
                name,
                f"is at most {largest:.4g}: it remembers {tokens:.3g} tokens, fewer than the {K} "
                "inputs that the weights are fitted to",
                False,
            )
        return
    if largest == 0:
        yield Finding(name, "is 0 everywhere: nothing is learned", False)
    size = s.rate if s.fn == "affine_projection" else strengths(s)
    if (value := float(xp.max(size))) > 2:
        square = {"lms": "times |x|^2 ", "nlms": "times |x|^2 / (eps + |x|^2) "}.get(s.fn, "")
        advice = "; la.nlms divides by |x|^2" if s.fn == "lms" else ""
        text = f"{square}is {value:.4g} at {first_of(xp, size == xp.max(size))}, expected 0 to 2: the step "
        text += f"multiplies the weights by {1 - value:.4g} along x{advice}"
        yield Finding(name, text, float(xp.min(size)) > 2)
