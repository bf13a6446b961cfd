"""The sampled next-token loss and the optimiser."""

import numpy as np
import pytest

from linattn_np.experiments.recall.loss import Sampler, next_token_loss
from linattn_np.experiments.recall.text import load_corpus


def test_the_sampled_loss_has_the_gradients_it_claims():
    corpus = load_corpus()
    rng = np.random.default_rng(0)
    candidates = Sampler(corpus).draw(rng)
    values, out = rng.standard_normal((len(corpus.log_prior), 8)), rng.standard_normal((2, 5, 8))
    target = rng.integers(0, len(values), (2, 5))
    target[0] = candidates.ids[:5]  # a target that is a candidate too counts once

    def loss(o: np.ndarray, log_tau: float) -> float:
        return next_token_loss(o, target, values, corpus.log_prior, log_tau, candidates)[0]

    _, dout, dlog_tau = next_token_loss(out, target, values, corpus.log_prior, 0.3, candidates)
    direction = rng.standard_normal(out.shape)
    slope = (loss(out + 1e-5 * direction, 0.3) - loss(out - 1e-5 * direction, 0.3)) / 2e-5
    assert (dout * direction).sum() == pytest.approx(slope, rel=1e-6)
    assert dlog_tau == pytest.approx((loss(out, 0.3 + 1e-5) - loss(out, 0.3 - 1e-5)) / 2e-5, rel=1e-6)


def test_the_loss_of_a_silent_memory_is_that_of_the_prior():
    corpus = load_corpus()
    target = np.arange(20)
    candidates = Sampler(corpus).draw(np.random.default_rng(0))
    values = np.zeros((len(corpus.log_prior), 4), np.float32)
    loss, dout, _ = next_token_loss(np.zeros((20, 4), np.float32), target, values, corpus.log_prior, 1.0, candidates)
    assert loss == pytest.approx(-corpus.log_prior[:20].mean(), abs=0.1)  # the sample stands for the whole vocabulary
    assert dout.dtype == np.float32
