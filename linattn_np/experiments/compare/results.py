"""Scores of many runs: by learning rate, the best one with its interval, the window of rates that succeed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ..statistics import student_t
from .sweep import Job, Score

RIGHT, NEAR = 0.9, 0.1  # success: a share of right answers (1 is all, 0 is chance), or nats above the best loss of all
Scores = Mapping[Job, Score]


class Cell(NamedTuple):
    """A mixer on a task. `seeds` are the scores at the best rate; larger is better unless is_loss."""

    best: float  # mean over seeds
    half: float  # of the 95 % interval over seeds; nan for one seed
    rate: float
    seeds: tuple[float, ...]
    by_rate: dict[float, float]  # means over seeds
    window: tuple[int, int]  # rates that succeed, of how many
    is_loss: bool


def scaled(score: float, chance: float | None) -> float:
    """The share of right answers beyond chance: 0 is chance, 1 is all; a loss as it is."""
    return score if chance is None else (score - chance) / (1 - chance)


def cells(scores: Scores, chances: Mapping[str, float | None]) -> dict[tuple[str, str], Cell]:
    """By task and mixer."""
    found: dict[tuple[str, str], Cell] = {}
    for task, chance in chances.items():
        means = {mixer: _by_rate(scores, task, mixer, chance) for mixer in _mixers(scores)}
        is_loss = chance is None
        least = min((min(map(np.mean, rates.values())) for rates in means.values()), default=0.0)
        for mixer, rates in means.items():
            mean = {rate: float(np.mean(x)) for rate, x in rates.items()}
            rate = (min if is_loss else max)(mean, key=mean.__getitem__)
            good = sum(bool(x <= least + NEAR if is_loss else x >= RIGHT) for x in mean.values())
            seeds = tuple(rates[rate])
            found[task, mixer] = Cell(mean[rate], interval(seeds), rate, seeds, mean, (good, len(mean)), is_loss)
    return found


def interval(x: Sequence[float]) -> float:
    """Half the width of the 95 % interval of a mean, by Student's t; nan for one number."""
    return float(student_t(len(x) - 1) * np.std(x, ddof=1) / len(x) ** 0.5) if len(x) > 1 else float("nan")


def _mixers(scores: Scores) -> list[str]:
    return list(dict.fromkeys(job.mixer for job in scores))


def _by_rate(scores: Scores, task: str, mixer: str, chance: float | None) -> dict[float, list[float]]:
    rates: dict[float, list[float]] = {}
    for job, score in scores.items():
        if (job.task, job.mixer) == (task, mixer):
            rates.setdefault(job.rate, []).append(scaled(score.mean, chance))
    return rates
