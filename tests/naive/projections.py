"""Raw projections as the delta rules take them: vectors divided by their length, the gate's formula."""

import numpy as np


def of_unit_length(x):
    """x / |x| along the last axis; rows of 0 stay 0."""
    x = np.array(x, np.float64)
    for row in x.reshape(-1, x.shape[-1]):
        length = np.sqrt(np.sum(row * row))
        if length > 0:
            row[:] = row / length
    return x


def lengths_out(q, k, qk_l2norm):
    """(q, k), of length 1 if that is asked for."""
    return tuple(of_unit_length(x) if qk_l2norm else np.asarray(x, np.float64) for x in (q, k))


def log_decay(g, A_log=None, dt_bias=None):
    """-e^(A_log_h) log(1 + e^(g + dt_bias_h)) where A_log is given; g (B, T, H) or (B, T, H, K)."""
    g = np.array(g, np.float64)
    if A_log is not None:
        for h in range(g.shape[2]):
            raw = g[:, :, h] if dt_bias is None else g[:, :, h] + np.float64(dt_bias[h])
            g[:, :, h] = -np.exp(np.float64(A_log[h])) * np.logaddexp(0, raw)
    return g
