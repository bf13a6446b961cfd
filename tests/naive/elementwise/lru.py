"""LRU, token by token."""

import numpy as np

from tests.naive.elementwise.scan import recurrence


def lru(x, nu_log, theta_log, gamma_log=None, scale=None, state=None):
    """h_t = l h_{t-1} + exp(gamma_log) x_t, l = exp(-exp(nu_log) + i exp(theta_log)); out_t = scale h_t."""
    gamma = 1.0 if gamma_log is None else np.exp(gamma_log)
    size, phase = np.exp(-np.exp(nu_log)), np.exp(theta_log)
    return recurrence(size * (np.cos(phase) + 1j * np.sin(phase)), gamma * x, scale, state)
