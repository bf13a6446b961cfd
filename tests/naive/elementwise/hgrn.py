"""HGRN, token by token."""

import numpy as np

from tests.naive.elementwise.scan import recurrence


def hgrn(x, g, scale=None, state=None):
    """h_t = e^(g_t) h_{t-1} + (1 - e^(g_t)) x_t; out_t = scale h_t."""
    forget = np.exp(g)
    return recurrence(forget, (1 - forget) * x, scale, state)
