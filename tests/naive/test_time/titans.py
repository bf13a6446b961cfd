"""Titans, one token after the other."""

from types import SimpleNamespace

import numpy as np

from ..learners import gelu, gelu_slope, learn, mixes, momentum_step


def titans(q, k, v, eta, mu, g, W1, W2, scale=None, state=None, mini_batch=16, read="after"):
    """f(x) = gelu(x W1) W2; S = mu S - eta d |f_A(k_t) - v_t|^2, W = e^g W + S."""

    def predict(h, w, x):
        return gelu(x @ w[0]) @ w[1]

    def gradient(h, w, x, target):
        y = x @ w[0]
        e = 2 * (gelu(y) @ w[1] - target)
        return np.outer(x, (w[1] @ e) * gelu_slope(y)), np.outer(gelu(y), e)

    rules = SimpleNamespace(
        predict=predict, gradient=gradient, step=momentum_step(eta, mu, g), **mixes(None, eta.shape, read)
    )
    return learn((q, k, v), (W1, W2), state, 1.0 if scale is None else scale, rules, mini_batch, momentum=1)
