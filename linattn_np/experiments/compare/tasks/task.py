"""A task."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

NONE = -100  # a label that has no loss
Batch = tuple[np.ndarray, np.ndarray]  # ids, labels (B, T)
Draw = Callable[[np.random.Generator, int], Batch]  # (rng, B)


class Task(NamedTuple):
    """draw makes batches of training, tests those of each kind of test, by name.

    chance: the share of right answers of one who knows nothing, or None if the score is the loss in nats.
    """

    name: str
    vocabulary: int
    draw: Draw
    tests: Mapping[str, Draw]
    chance: float | None
    tokens: int  # of a sequence of training

    def batch(self, seed: int, B: int) -> Callable[[int], Batch]:
        """Batch number n of training."""
        return lambda n: self.draw(np.random.default_rng((seed, n)), B)


def unlabelled(B: int, T: int) -> tuple[np.ndarray, np.ndarray]:
    """ids of 0 and labels without an answer."""
    return np.zeros((B, T), np.int64), np.full((B, T), NONE, np.int64)


def distinct(rng: np.random.Generator, B: int, count: int, of: int) -> np.ndarray:
    """(B, count) numbers below `of`, those of a row all different."""
    return rng.random((B, of)).argsort(axis=1)[:, :count]
