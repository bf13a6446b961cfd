"""Diagonal plus low rank, token by token."""

import numpy as np

from tests.naive.heads import head_of


def dplr(q, k, v, g, a, b, scale=None, state=None):
    """S_t = diag(e^(g_t)) S_{t-1} + b_t^T (a_t S_{t-1}) + k_t^T v_t; o_t = scale q_t S_t; g (B, T, H, K)."""
    q, k, v, g, a, b = (np.asarray(x, np.float64) for x in (q, k, v, g, a, b))
    B, T, H, V = v.shape
    Hq, (Hk, K) = q.shape[2], k.shape[2:]
    H_out = max(Hq, H)
    scale = 1.0 if scale is None else scale
    S = np.zeros((B, H, K, V)) if state is None else np.array(state, np.float64)
    out = np.zeros((B, T, H_out, V))
    for n in range(B):
        for t in range(T):
            for h in range(H):
                k_t = k[n, t, head_of(h, Hk, H)]
                a_t = a[n, t, head_of(h, a.shape[2], H)]
                b_t = b[n, t, head_of(h, b.shape[2], H)]
                erased = np.outer(b_t, a_t @ S[n, h])
                S[n, h] = np.exp(g[n, t, h])[:, None] * S[n, h] + erased + np.outer(k_t, v[n, t, h])
            for h in range(H_out):
                out[n, t, h] = scale * q[n, t, head_of(h, Hq, H_out)] @ S[n, head_of(h, H, H_out)]
    return out, S
