"""Retention (RetNet), token by token."""

import numpy as np

from tests.naive.heads import head_of


def retention(q, k, v, g=None, scale=None, state=None):
    """S_t = e^g S_{t-1} + k_t^T v_t; o_t = scale q_t S_t; g (H,) or (H, K), None: log(1 - 2^(-5-h))."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    B, T, H, V = v.shape
    Hq, (Hk, K) = q.shape[2], k.shape[2:]
    H_out = max(Hq, H)
    scale = K**-0.5 if scale is None else scale
    if g is None:
        g = np.array([np.log(1 - 2.0 ** (-5 - h)) for h in range(H)])
    g = np.asarray(g, np.float64)
    S = np.zeros((B, H, K, V)) if state is None else np.array(state, np.float64)
    out = np.zeros((B, T, H_out, V))
    for b in range(B):
        for t in range(T):
            for h in range(H):
                decay = np.exp(g[h]) * np.ones(K)
                S[b, h] = decay[:, None] * S[b, h] + np.outer(k[b, t, head_of(h, Hk, H)], v[b, t, h])
            for h in range(H_out):
                out[b, t, h] = scale * q[b, t, head_of(h, Hq, H_out)] @ S[b, head_of(h, H, H_out)]
    return out, S
