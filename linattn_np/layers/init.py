"""Initialisations: the shape of a parameter and the distribution that it is drawn from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

Draw = Callable[["np.random.Generator", tuple[int, ...]], Any]


class Init(NamedTuple):
    """A parameter before training."""

    shape: tuple[int, ...]
    draw: Draw


def normal(*shape: int, std: float | None = None) -> Init:
    """Normal numbers; std: fan-in ** -0.5 by default, the fan-in being the first axis."""
    size = shape[0] ** -0.5 if std is None else std
    return Init(shape, lambda rng, shape: size * rng.standard_normal(shape))


def uniform(*shape: int, bound: float) -> Init:
    """Numbers in [-bound, bound)."""
    return Init(shape, lambda rng, shape: rng.uniform(-bound, bound, shape))


def full(*shape: int, value: float) -> Init:
    return Init(shape, lambda rng, shape: np.full(shape, value))


def ones(*shape: int) -> Init:
    return full(*shape, value=1.0)


def zeros(*shape: int) -> Init:
    return full(*shape, value=0.0)


def spaced(*shape: int, first: float, last: float) -> Init:
    """Evenly spaced numbers along the last axis."""
    return Init(shape, lambda rng, shape: np.broadcast_to(np.linspace(first, last, shape[-1]), shape))


def log_uniform(*shape: int, low: float, high: float) -> Init:
    """The logarithm of numbers in [low, high): A_log of Mamba-2 (1, 16)."""
    return Init(shape, lambda rng, shape: np.log(rng.uniform(low, high, shape)))


def step_bias(*shape: int, low: float = 1e-3, high: float = 0.1, floor: float = 1e-4) -> Init:
    """dt_bias of Mamba: softplus of it is log-uniform in [low, high), at least `floor`."""

    def draw(rng: np.random.Generator, shape: tuple[int, ...]) -> Any:
        dt = np.maximum(np.exp(rng.uniform(np.log(low), np.log(high), shape)), floor)
        return dt + np.log(-np.expm1(-dt))  # softplus^-1(dt)

    return Init(shape, draw)


def size(shape: tuple[int, ...]) -> int:
    """The number of elements of a shape."""
    return int(np.prod(shape, dtype=np.int64))
