"""Learning: deterministic, effective, and equal to the shipped gates."""

import zlib

import numpy as np
import pytest

from linattn_np.experiments.recall.gates import SHIPPED, load_gate_sets
from linattn_np.experiments.recall.learn import START_TAU, LearningJob, batches, learn, loss_of
from linattn_np.experiments.recall.memories import LEARNED, RECURRENT
from linattn_np.experiments.recall.text import load_corpus

SHIPPED_PROSE = 3862968072  # CRC-32 of the tokens that the shipped gates were learned from


def test_the_same_job_learns_the_same_numbers():
    first, second = (learn(LearningJob("facts", "gated_delta", 3, steps=2, heldout_steps=1)) for _ in range(2))
    assert first.loss == second.loss
    assert all(np.array_equal(first.logits[part], second.logits[part]) for part in first.logits)


@pytest.mark.parametrize("memory", LEARNED)
def test_the_shipped_gates_predict_better_than_the_initial_ones(memory):
    """A fast check of the shipped gates; the slow tests below repeat the learning itself."""
    job = LearningJob("facts", memory, 0, steps=0, heldout_steps=3)
    shipped = load_gate_sets(["facts"])["facts"][0][memory]
    initial = {part: np.array(x) for part, x in RECURRENT[memory].start.items()} | {"log_tau": np.log([START_TAU])}
    losses = [[loss_of(job, logits, batch) for logits in (shipped.logits, initial)] for batch in batches(job)]
    assert all(ours < other - 0.01 for ours, other in losses)
    assert np.mean(losses, axis=0)[0] == pytest.approx(shipped.loss, abs=0.1)


def test_a_few_steps_of_learning_lower_the_loss():
    losses = [learn(LearningJob("facts", "write_gate", 0, steps, heldout_steps=2)).loss for steps in (1, 12)]
    assert losses[1] < losses[0] - 0.1


def assert_learned_as_shipped(gate_set: str, memory: str, seed: int) -> None:
    """Full learning gives the shipped logits within 0.1."""
    corpus = load_corpus()
    prose = " ".join(corpus.vocabulary.names[i] for i in corpus.train)
    if zlib.crc32(prose.encode()) != SHIPPED_PROSE:
        pytest.skip("the shipped gates were learned from the help of another Python version")
    shipped = load_gate_sets([gate_set])[gate_set][seed][memory]
    learned = learn(LearningJob(gate_set, memory, seed))
    assert learned.logits.keys() == shipped.logits.keys()
    for part, logits in learned.logits.items():
        np.testing.assert_allclose(logits, shipped.logits[part], atol=0.1)
    assert learned.loss == pytest.approx(shipped.loss, abs=0.01)


@pytest.mark.slow
def test_learning_reproduces_the_shipped_numbers():
    assert_learned_as_shipped("facts", "write_gate", 0)


@pytest.mark.slow
@pytest.mark.parametrize(("memory", "gate_set"), [(m, SHIPPED[n % 3]) for n, m in enumerate(LEARNED)])
def test_learning_reproduces_the_shipped_numbers_of_every_memory(memory, gate_set):
    """One set of each memory, and each set with two memories or more: another set takes the same code."""
    assert_learned_as_shipped(gate_set, memory, 1)
