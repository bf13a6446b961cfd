"""The linear recurrence, token by token."""

import numpy as np


def recurrence(a, x, scale, state):
    """h_t = a_t h_{t-1} + x_t; out_t = scale h_t, of (B, T, D) and a constant (D,)."""
    (B, T, D), kind = x.shape, np.result_type(a, x, np.float64 if state is None else state, np.float64)
    h, out = np.zeros((B, D), kind) if state is None else np.array(state, kind), np.zeros((B, T, D), kind)
    for b in range(B):
        for t in range(T):
            h[b] = (a if a.ndim == 1 else a[b, t]) * h[b] + x[b, t]
            out[b, t] = (1.0 if scale is None else scale) * h[b]
    return out, h


def scan(a, x, scale=None, state=None, log=False):
    """h_t = a_t h_{t-1} + x_t, or e^(a_t) h_{t-1} + x_t; out_t = scale h_t."""
    return recurrence(np.exp(a) if log else a, x, scale, state)
