"""Seeds that a computation draws from random generators, kept so that it can be repeated with the same numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar

import numpy as np

_kept: ContextVar[list[int] | None] = ContextVar("kept", default=None)
_repeated: ContextVar[Iterator[int] | None] = ContextVar("repeated", default=None)


def seed_of(rng: np.random.Generator) -> int:
    """A seed drawn from a generator, or the next one of a computation that is repeated."""
    known = _repeated.get()
    seed = int(rng.integers(1 << 63)) if known is None else next(known)
    if (seeds := _kept.get()) is not None:
        seeds.append(seed)
    return seed


@contextlib.contextmanager
def kept() -> Iterator[list[int]]:
    """The seeds that are drawn inside, in order."""
    seeds = list[int]()
    before = _kept.set(seeds)
    try:
        yield seeds
    finally:
        _kept.reset(before)
        if (outer := _kept.get()) is not None:
            outer += seeds


@contextlib.contextmanager
def repeated(seeds: Sequence[int]) -> Iterator[None]:
    """Seeds that were kept are given again, in their order; no generator is touched."""
    before = _repeated.set(iter(seeds))
    try:
        yield
    finally:
        _repeated.reset(before)
