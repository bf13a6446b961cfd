"""What one layer with eigenvalues in [-1, 1] can hold: words of exchanges. Grazzi et al., arXiv 2411.12537."""

from __future__ import annotations

import numpy as np

import linattn_np as la

N, T = 5, 500


def test_one_delta_rule_multiplies_exchanges_of_five_items():
    """I - 2 k^T k with k = (e_i - e_j) / sqrt 2 exchanges rows i and j of the state: any word of S5, of any length."""
    rng = np.random.default_rng(0)
    words, items = np.array([rng.choice(N, 2, replace=False) for _ in range(T)]), np.arange(N)
    keys = (np.eye(N)[words[:, 0]] - np.eye(N)[words[:, 1]]) * 2**-0.5
    k = keys[None, :, None]
    read = np.broadcast_to(np.arange(N) @ np.eye(N), k.shape) * 1.0  # a query that names every row by its number
    found = la.delta_rule(read, k, np.zeros((1, T, 1, N)), np.full((1, T, 1), 2.0), scale=1.0,
                          state=np.eye(N)[None, None], return_state=True)  # fmt: skip
    for t, (i, j) in enumerate(words):
        items[[i, j]] = items[[j, i]]
        assert np.allclose(found.out[0, t, 0], np.argsort(items), atol=1e-9)
    assert np.allclose(found.state[0, 0], np.eye(N)[items], atol=1e-9)
