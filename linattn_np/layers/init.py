"""Initialisations: the shape of a parameter and the distribution that it is drawn from. They can be pickled."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

Shape = tuple[int, ...]
Draw = Callable[["np.random.Generator", Shape], Any]


class Init(NamedTuple):
    """A parameter before training."""

    shape: Shape
    draw: Draw


def normal(*shape: int, std: float | None = None) -> Init:
    """Normal numbers; std: fan-in ** -0.5 by default, the fan-in being the first axis."""
    return Init(shape, partial(_normal, shape[0] ** -0.5 if std is None else std))


def uniform(*shape: int, bound: float) -> Init:
    """Numbers in [-bound, bound)."""
    return Init(shape, partial(_uniform, bound))


def full(*shape: int, value: float) -> Init:
    return Init(shape, partial(_full, value))


def ones(*shape: int) -> Init:
    return full(*shape, value=1.0)


def zeros(*shape: int) -> Init:
    return full(*shape, value=0.0)


def spaced(*shape: int, first: float, last: float) -> Init:
    """Evenly spaced numbers along the last axis."""
    return Init(shape, partial(_spaced, first, last))


def log_uniform(*shape: int, low: float, high: float) -> Init:
    """The logarithm of numbers in [low, high): A_log of Mamba-2 (1, 16)."""
    return Init(shape, partial(_log_uniform, low, high))


def step_bias(*shape: int, low: float = 1e-3, high: float = 0.1, floor: float = 1e-4) -> Init:
    """dt_bias of Mamba: softplus of it is log-uniform in [low, high), at least `floor`."""
    return Init(shape, partial(_step_bias, low, high, floor))


def _normal(std: float, rng: np.random.Generator, shape: Shape) -> Any:
    return std * rng.standard_normal(shape)


def _uniform(bound: float, rng: np.random.Generator, shape: Shape) -> Any:
    return rng.uniform(-bound, bound, shape)


def _full(value: float, rng: np.random.Generator, shape: Shape) -> Any:
    return np.full(shape, value)


def _spaced(first: float, last: float, rng: np.random.Generator, shape: Shape) -> Any:
    return np.broadcast_to(np.linspace(first, last, shape[-1]), shape)


def _log_uniform(low: float, high: float, rng: np.random.Generator, shape: Shape) -> Any:
    return np.log(rng.uniform(low, high, shape))


def _step_bias(low: float, high: float, floor: float, rng: np.random.Generator, shape: Shape) -> Any:
    dt = np.maximum(np.exp(rng.uniform(np.log(low), np.log(high), shape)), floor)
    return dt + np.log(-np.expm1(-dt))  # softplus^-1(dt)


def size(shape: Shape) -> int:
    """The number of elements of a shape."""
    return int(np.prod(shape, dtype=np.int64))
