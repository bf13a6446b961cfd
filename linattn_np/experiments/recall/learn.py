"""Learning of gates by next-token prediction on prose, with gradients from `la.vjp`."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

import linattn_np as la

from .codes import load_codes
from .gates import Learned
from .loss import Adam, Candidates, Sampler, next_token_loss
from .memories import RECURRENT, Logits
from .streams import training_windows
from .text import load_corpus

STEPS, HELDOUT_STEPS = 250, 20
TOKENS_PER_STEP = 4096
RATE, WARM_UP, LAST_RATE = 0.15, 10, 0.05  # linear warm-up, then cosine decay to 5 %
START_TAU = 12.0  # initial factor of the output logits


@dataclass(frozen=True)
class Reading:
    """Training windows of a gate set: `length` tokens, with `needles` facts that are stated and queried."""

    length: int
    needles: int


READINGS = {"prose": Reading(2048, 0), "mixed": Reading(2048, 1), "facts": Reading(1024, 2)}


@dataclass(frozen=True)
class LearningJob:
    """One memory, one gate set, one seed."""

    gate_set: str
    memory: str
    seed: int
    steps: int = STEPS
    heldout_steps: int = HELDOUT_STEPS


class Batch(NamedTuple):
    """Inputs of a memory and targets of its read-out: q, k, v (B, T, 1, K), classes and target (B, T)."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    classes: np.ndarray
    target: np.ndarray
    candidates: Candidates


def learn(job: LearningJob) -> Learned:
    """Learned logits and held-out loss in nats per token; deterministic."""
    memory, adam = RECURRENT[job.memory], Adam()
    logits: Logits = {name: np.array(start) for name, start in memory.start.items()}
    logits["log_tau"] = np.log([START_TAU])
    heldout = []
    for step, batch in enumerate(batches(job)):
        if step >= job.steps:
            heldout.append(loss_of(job, logits, batch))
            continue
        arrays = memory.arrays(logits, batch.classes, *batch[:3])
        out, pullback = la.vjp(memory.function, *arrays, scale=1, **memory.learning)
        _, dout, dlog_tau = _scored(job, logits, batch, out)
        dheads = np.broadcast_to(dout[:, :, None], out.shape)  # the heads are added up
        grads = memory.pullback(logits, batch.classes, batch.v, pullback(dheads))
        logits = adam.step(logits, grads | {"log_tau": np.array([dlog_tau])}, learning_rate(step, job.steps))
    return Learned(logits, float(np.mean(heldout)))


def batches(job: LearningJob) -> Iterator[Batch]:
    """`steps` batches of training prose, then `heldout_steps` of held-out prose."""
    reading, corpus, codes = READINGS[job.gate_set], load_corpus(), load_codes(job.seed)
    sampler, rng, draws = Sampler(corpus), random.Random(job.seed), np.random.default_rng(job.seed)
    for step in range(job.steps + job.heldout_steps):
        prose = corpus.train if step < job.steps else corpus.heldout
        size = TOKENS_PER_STEP // reading.length
        window = training_windows(corpus, prose, rng, size, reading.length, reading.needles)
        ids, target = window[:, :-1], window[:, 1:]
        contexts = codes.contexts(ids)[:, :, None]
        v = codes.values[ids][:, :, None]
        yield Batch(contexts[:, 1:], contexts[:, :-1], v, corpus.classes[ids], target, sampler.draw(draws))


def loss_of(job: LearningJob, logits: Logits, batch: Batch) -> float:
    """The loss of a memory with these logits on one batch."""
    memory = RECURRENT[job.memory]
    out = memory.function(*memory.arrays(logits, batch.classes, *batch[:3]), scale=1, **memory.learning)
    return _scored(job, logits, batch, out)[0]


def _scored(job: LearningJob, logits: Logits, batch: Batch, out: np.ndarray) -> tuple[float, np.ndarray, float]:
    """Loss and gradients of the outputs (B, T, 1, V) of a memory."""
    values, log_prior = load_codes(job.seed).values, load_corpus().log_prior
    return next_token_loss(out.sum(2), batch.target, values, log_prior, logits["log_tau"][0], batch.candidates)


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up over the first steps, times a half cosine from 100 to 5 %."""
    cosine = 0.5 * (1 + np.cos(np.pi * step / steps))
    return RATE * min(1, (step + 1) / WARM_UP) * (LAST_RATE + (1 - LAST_RATE) * cosine)
