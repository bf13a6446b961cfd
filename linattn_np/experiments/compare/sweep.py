"""One run: a small model of one mixer, trained on one task at one learning rate from one seed, and its scores."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import linattn_np as la

from ...runtime.arrays import compat
from ...train.flat import on_host
from ..workers import run_jobs
from .ablations import ABLATIONS, layer_of
from .tasks import TASKS, text
from .tasks.task import Batch, Draw, Task

TESTS, AHEAD = 4, 10**6  # batches of a test; a seed that training does not have


class Setup(NamedTuple):
    """The same for all runs."""

    width: int = 32
    layers: int = 2
    heads: int = 2
    batch: int = 32
    steps: int = 500
    mlp: str = "none"
    decay: float = 0.1
    text: str | None = None  # a file of the task "text"
    device: str = "cpu"  # or "cuda", the current device of CuPy


class Job(NamedTuple):
    """mixer: a name and perhaps options, "delta_rule:allow_neg_eigval" or "softmax_attention:window=16"."""

    task: str
    mixer: str
    rate: float
    seed: int
    setup: Setup


class Score(NamedTuple):
    """The mean over the tests, each of them, the loss by step; a run that diverged has no losses behind that."""

    mean: float
    tests: dict[str, float]
    losses: list[float]


def task_of(name: str, setup: Setup) -> Task:
    return text.task(setup.text) if name == "text" else TASKS[name]()


def parsed(mixer: str) -> tuple[str, dict[str, Any]]:
    """Name and options.   Raises ValueError for a value that is no whole number, True, False or word."""
    name, *more = mixer.split(":")
    options: dict[str, Any] = {}
    for each in more:
        option, sign, value = each.partition("=")
        words: Mapping[str, Any] = {"": True, "True": True, "False": False}
        options[option] = words[value] if value in words else int(value) if value.isdecimal() else value
        if sign and not value:
            raise ValueError(f"{mixer}: {option} has no value")
    return name, options


def model_of(job: Job, vocabulary: int) -> la.layers.Model:
    """Blocks of the mixer and an MLP."""
    name, options = parsed(job.mixer)
    s = job.setup
    own = name if name not in ABLATIONS else lambda c: layer_of(name, c, options)
    return la.layers.language_model(vocabulary, D=s.width, layers=s.layers, mixers=[own], heads=s.heads, mlp=s.mlp,
                                    options={name: options} if options else {})  # fmt: skip


def train(job: Job) -> Score:
    """The scores of one run; 0, or an infinite loss, for one that diverged."""
    task, s = task_of(job.task, job.setup), job.setup
    model = model_of(job, task.vocabulary)
    run = la.train.Run.start(model.loss, la.train.AdamW(decay=s.decay), job.seed).to(s.device)
    try:
        with np.errstate(all="ignore"):
            la.train.fit(model.loss, run, task.batch(job.seed, s.batch), s.steps, la.train.cosine(job.rate, s.steps),
                         bar=False)  # fmt: skip
            measure = loss_of if task.chance is None else share_right
            tests = {name: measure(model, run.params.arrays, draw, s.batch) for name, draw in task.tests.items()}
    except FloatingPointError:
        tests = dict.fromkeys(task.tests, np.inf if task.chance is None else 0.0)
    return Score(float(np.mean(list(tests.values()))), tests, run.losses)


def share_right(model: la.layers.Model, params: dict[str, Any], draw: Draw, B: int) -> float:
    """The share of labels that are the likeliest token."""
    right = count = 0
    put = _library(params).asarray
    for ids, labels in _batches(draw, B):
        found, has = on_host(model.logits(params, put(ids)).argmax(axis=-1)), labels >= 0
        right, count = right + int((found == labels)[has].sum()), count + int(has.sum())
    return right / count


def loss_of(model: la.layers.Model, params: dict[str, Any], draw: Draw, B: int) -> float:
    put = _library(params).asarray
    return float(np.mean([float(model.loss(params, *map(put, batch))) for batch in _batches(draw, B)]))


def _library(params: dict[str, Any]) -> Any:
    """That of the parameters."""
    return compat.array_namespace(*params.values())


def _batches(draw: Draw, B: int) -> list[Batch]:
    """The same for every run."""
    return [draw(np.random.default_rng((AHEAD, n)), B) for n in range(TESTS)]


def train_all(jobs: Sequence[Job], cost: Callable[[Job], int], processes: int, label: str,
              file: Path | None = None) -> dict[Job, Score]:  # fmt: skip
    """The scores of all jobs. Those in a file, a line of JSON each, are not trained again; others are added to it."""
    known = {} if file is None else scores_in(file)
    with contextlib.nullcontext() if file is None else file.open("a", encoding="utf8") as lines:

        def keep(job: Job, score: Score) -> None:
            if lines is not None:
                lines.write(json.dumps([[*job[:-1], job.setup._asdict()], score]) + "\n")
                lines.flush()

        return run_jobs(train, jobs, cost, processes, label, known, keep)


def scores_in(file: Path) -> dict[Job, Score]:
    """The scores in a file of `train_all`; a last line that was cut off is removed.   Raises ValueError for others."""
    if not file.exists():
        return {}
    text = file.read_text("utf8")
    whole, _, cut = text.rpartition("\n")
    if cut:
        file.write_text(whole + "\n" if whole else "", "utf8")
    try:
        lines = [json.loads(line) for line in whole.splitlines()]
        return {Job(task, mixer, rate, seed, Setup(**setup)): Score(*score)
                for (task, mixer, rate, seed, setup), score in lines}  # fmt: skip
    except (TypeError, ValueError) as problem:
        raise ValueError(f"{file} has other lines than finished runs: {problem}") from problem


Train = Callable[[Job], Score]
