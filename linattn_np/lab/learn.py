"""Gates are learned: next-token prediction on prose, gradients by the library's own vjp."""

import random
from dataclasses import dataclass

import numpy as np

import linattn_np as la

from .codes import load_codes
from .gates import Learned
from .loss import Adam, Sampler, next_token_loss
from .memories import RECURRENT, Logits
from .streams import training_windows
from .text import load_corpus

STEPS, HELDOUT_STEPS = 250, 20
TOKENS_PER_STEP = 4096
RATE, WARM_UP, LAST_RATE = 0.15, 10, 0.05  # rate rises over the first steps, then a cosine down to 5 % of it
START_TAU = 12.0


@dataclass(frozen=True)
class Reading:
    """What a gate set reads: windows of `length` tokens, each with `needles` facts that are stated and asked."""

    length: int
    needles: int


READINGS = {"prose": Reading(2048, 0), "mixed": Reading(2048, 1), "facts": Reading(1024, 2)}


@dataclass(frozen=True)
class LearningJob:
    """One memory learns one gate set with one seed."""

    gate_set: str
    memory: str
    seed: int
    steps: int = STEPS


def learn(job: LearningJob) -> Learned:
    """Learned logits and the held-out loss in nats a token; the same job gives the same numbers."""
    reading, memory = READINGS[job.gate_set], RECURRENT[job.memory]
    corpus, codes = load_corpus(), load_codes(job.seed)
    sampler, adam = Sampler(corpus), Adam()
    rng, draws = random.Random(job.seed), np.random.default_rng(job.seed)
    logits: Logits = {name: np.array(start) for name, start in memory.start.items()}
    logits["log_tau"] = np.log([START_TAU])
    heldout = []
    for step in range(job.steps + HELDOUT_STEPS):
        learning = step < job.steps
        prose = corpus.train if learning else corpus.heldout
        batch = TOKENS_PER_STEP // reading.length
        window = training_windows(corpus, prose, rng, batch, reading.length, reading.needles)
        ids, target = window[:, :-1], window[:, 1:]
        classes, v = corpus.classes[ids], codes.values[ids][:, :, None]
        contexts = codes.contexts(ids)[:, :, None]
        arrays = memory.arrays(logits, classes, contexts[:, 1:], contexts[:, :-1], v)
        score = (target, codes.values, corpus.log_prior, logits["log_tau"][0], sampler.draw(draws))
        if not learning:
            heldout.append(next_token_loss(memory.function(*arrays, scale=1)[:, :, 0], *score)[0])
            continue
        out, pullback = la.vjp(memory.function, *arrays, scale=1)
        _, dout, dlog_tau = next_token_loss(out[:, :, 0], *score)
        grads = memory.pullback(logits, classes, v, pullback(dout[:, :, None]))
        logits = adam.step(logits, grads | {"log_tau": np.array([dlog_tau])}, learning_rate(step, job.steps))
    return Learned(logits, float(np.mean(heldout)))


def learning_rate(step: int, steps: int) -> float:
    """A straight rise over the first steps times a half cosine from 1 to 5 %."""
    cosine = 0.5 * (1 + np.cos(np.pi * step / steps))
    return RATE * min(1, (step + 1) / WARM_UP) * (LAST_RATE + (1 - LAST_RATE) * cosine)
