"""Longhorn as published, token by token."""

import numpy as np


def diagonal_longhorn(q, k, v, beta, scale=None, state=None):
    """h[d, n] <- (1 - b_d k_n^2) h[d, n] + b_d k_n v_d, b = beta / (1 + beta |k|^2); out_d = scale q h_d."""
    (B, T, D), N, scale = v.shape, k.shape[-1], 1.0 if scale is None else scale
    h, out = np.zeros((B, D, N)) if state is None else np.array(state, float), np.zeros((B, T, D))
    for b in range(B):
        for t in range(T):
            for d in range(D):
                step = beta[b, t, d] / (1 + beta[b, t, d] * (k[b, t] @ k[b, t]))
                h[b, d] = (1 - step * k[b, t] ** 2) * h[b, d] + step * k[b, t] * v[b, t, d]
                out[b, t, d] = scale * q[b, t] @ h[b, d]
    return out, h
