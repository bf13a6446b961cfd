"""RG-LRU, token by token."""

import numpy as np

from tests.naive.elementwise.scan import recurrence


def rg_lru(x, r, i, Lambda, scale=None, state=None):
    """h_t = a_t h_{t-1} + sqrt(1 - a_t^2) sigmoid(i_t) x_t, a_t = sigmoid(Lambda')^(8 sigmoid(r_t)); out_t = scale h_t.

    The paper's a = sigmoid(Lambda'), Lambda' = -Lambda: log a = -softplus(Lambda).
    """
    sigmoid = lambda y: 1 / (1 + np.exp(-y))  # noqa: E731
    a = sigmoid(-Lambda) ** (8 * sigmoid(r))
    return recurrence(a, np.sqrt(1 - a * a) * sigmoid(i) * x, scale, state)
