"""minGRU, token by token."""

import numpy as np

from tests.naive.elementwise.scan import recurrence


def min_gru(x, z, scale=None, state=None):
    """h_t = (1 - s_t) h_{t-1} + s_t x_t, s_t = sigmoid(z_t); out_t = scale h_t."""
    s = 1 / (1 + np.exp(-z))
    return recurrence(1 - s, s * x, scale, state)
