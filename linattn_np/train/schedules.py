"""The rate of a step, counted from 0. Schedules can be pickled."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

Schedule = Callable[[int], float]


def constant(rate: float) -> Schedule:
    """The same rate for every step."""
    return partial(_constant, rate)


def cosine(rate: float, steps: int, warmup: float = 0.1, last: float = 0.0) -> Schedule:
    """Rises linearly to `rate` in the share `warmup` of the steps, then falls along a cosine to `last`.

    Raises ValueError for a share that is not in [0, 1).
    """
    if not 0 <= warmup < 1:
        raise ValueError(f"cosine: warmup is {warmup}, expected a share of the steps in [0, 1)")
    return partial(_cosine, rate, steps, round(warmup * steps), last)


def _constant(rate: float, step: int) -> float:
    return rate


def _cosine(rate: float, steps: int, rise: int, last: float, step: int) -> float:
    if step < rise:
        return rate * (step + 1) / rise
    share = min(1.0, (step - rise) / max(1, steps - rise))
    return last + (rate - last) * 0.5 * (1 + math.cos(math.pi * share))
