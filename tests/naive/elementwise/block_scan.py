"""The linear recurrence of vectors under matrices, token by token."""

import numpy as np


def block_scan(a, x, scale=None, state=None):
    """h_t[d] = a_t[d] h_{t-1}[d] + x_t[d], matrices a_t[d] (N, N), vectors h_t[d] (N,); out_t = scale h_t."""
    B, T, D, N = x.shape
    kind = np.result_type(a, x, np.float64 if state is None else state, np.float64)
    h, out = np.zeros((B, D, N), kind) if state is None else np.array(state, kind), np.zeros((B, T, D, N), kind)
    for b in range(B):
        for t in range(T):
            for d in range(D):
                h[b, d] = (a[d] if a.ndim == 3 else a[b, t, d]) @ h[b, d] + x[b, t, d]
            out[b, t] = (1.0 if scale is None else scale) * h[b]
    return out, h
