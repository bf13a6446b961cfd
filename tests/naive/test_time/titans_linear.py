"""Titans with a matrix, one token after the other."""

from types import SimpleNamespace

import numpy as np

from ..learners import learn, mixes, momentum_step


def titans_linear(q, k, v, eta, mu, g, W, scale=None, state=None, mini_batch=16, read="after"):
    """S = mu S - 2 eta k^T (k A - v), W = e^g W + S."""
    rules = SimpleNamespace(
        predict=lambda h, w, x: x @ w[0],
        gradient=lambda h, w, x, target: [2 * np.outer(x, x @ w[0] - target)],
        step=momentum_step(eta, mu, g),
        **mixes(None, eta.shape, read),
    )
    return learn((q, k, v), (W,), state, 1.0 if scale is None else scale, rules, mini_batch, momentum=1)
