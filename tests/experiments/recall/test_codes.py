"""Hashed values and keys."""

import numpy as np

from linattn_np.experiments.recall.codes import Codes

NAMES = [f"t{i}" for i in range(400)]


def test_values_are_unit_vectors_of_their_token_and_seed():
    codes, same, other = Codes(NAMES, 0), Codes(NAMES[:9], 0), Codes(NAMES, 1)
    assert np.allclose(np.linalg.norm(codes.values, axis=1), 1, atol=1e-6)
    assert np.array_equal(codes.values[:9], same.values)
    assert np.abs(codes.values @ other.values.T).max() < 0.6


def test_context_codes_are_unit_and_see_only_earlier_tokens():
    ids = np.random.default_rng(0).integers(0, len(NAMES), (3, 50))
    codes = Codes(NAMES, 0)
    contexts = codes.contexts(ids)
    assert contexts.shape == (3, 51, codes.values.shape[1])
    assert contexts.dtype == np.float32
    assert np.allclose(np.linalg.norm(contexts, axis=-1), 1, atol=1e-5)
    changed = ids.copy()
    changed[:, 20:] = 7
    assert np.array_equal(codes.contexts(changed)[:, :21], contexts[:, :21])


def test_contexts_that_end_alike_are_close_by_the_tokens_they_share():
    rng = np.random.default_rng(1)
    codes = Codes(NAMES, 0)
    ids = rng.integers(0, len(NAMES), (2000, 8))
    expected = (0.0, 0.04, 0.18, 0.59, 1.0)  # running sums of the squared weights
    for shared, cosine in enumerate(expected):
        x, y = ids, rng.integers(0, len(NAMES), ids.shape)
        if shared:
            y[:, -shared:] = x[:, -shared:]
        found = (codes.contexts(x)[:, -1] * codes.contexts(y)[:, -1]).sum(-1).mean()
        assert abs(found - cosine) < 0.02
