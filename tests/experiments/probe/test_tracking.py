"""Permutations and parity."""

import numpy as np
import pytest

from linattn_np.experiments.probe import tracking


def test_four_steps_follow_any_permutation_of_five_and_fewer_do_not():
    swaps, history = tracking.words(np.random.default_rng(1), 500)
    said, S = tracking.track(swaps, np.float64, exact=True)
    np.testing.assert_array_equal(said, history[:, 0])
    np.testing.assert_array_equal(S, np.eye(5)[history[-1]])
    assert np.mean(tracking.track(swaps[:, :2], np.float64, exact=True)[0] == history[:, 0]) < 0.5


@pytest.mark.parametrize(("beta", "share"), [(2.0, 1.0), (1.5, 1.0), (1.0, 0.0)])
def test_parity_needs_a_strength_above_one(beta, share):
    bits = np.random.default_rng(2).integers(0, 2, 60)
    bits[0] = 1
    assert tracking.parity(beta, bits, np.float64)[0] == share


def test_the_verdict_on_parity_follows_its_figures():
    right = {(m, d, e): 0.5 for m in (1, 2, 4) for d in (np.float64, np.float32) for e in (True, False)}
    signs = {(b, np.float64, n): (float(b > 1), b) for b in (1.0, 2.0) for n in (100, 700)}
    sentences = tracking._sentences(right, signs, (1.0, 2.0), 700, False, 0.0)
    assert "50 % of 700" in sentences[0]
    assert sentences[1] == "Two steps did not form a cycle of three."
    assert "beta in {2}, that of 700 bits in float64 for {2}" in sentences[2]
