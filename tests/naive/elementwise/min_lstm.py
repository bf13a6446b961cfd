"""minLSTM, token by token."""

import numpy as np

from tests.naive.elementwise.scan import recurrence


def min_lstm(x, f, i, scale=None, state=None):
    """h_t = (f'_t h_{t-1} + i'_t x_t) / (f'_t + i'_t), the sigmoids of f and i; out_t = scale h_t."""
    f, i = 1 / (1 + np.exp(-f)), 1 / (1 + np.exp(-i))
    return recurrence(f / (f + i), i / (f + i) * x, scale, state)
