"""RWKV-4, token by token."""

import numpy as np


def rwkv4(k, v, w, u, scale=None, state=None):
    """S_t = e^-w S_{t-1} + e^k v, n likewise of 1, before which out_t = (scale S + e^(u+k) v) / (scale n + e^(u+k)).

    S and n are stored as e^-m times the sums, m_t = max(m_{t-1} - w, k_t).
    """
    (B, T, D), scale = v.shape, 1.0 if scale is None else scale
    S, n, m = (np.zeros((B, D)), np.zeros((B, D)), np.full((B, D), -1e30)) if state is None else map(np.array, state)
    out = np.zeros((B, T, D))
    for b in range(B):
        for t in range(T):
            for d in range(D):
                most = max(m[b, d], u[d] + k[b, t, d])
                past, own = scale * np.exp(m[b, d] - most), np.exp(u[d] + k[b, t, d] - most)
                out[b, t, d] = (past * S[b, d] + own * v[b, t, d]) / (past * n[b, d] + own)
                most = max(m[b, d] - w[d], k[b, t, d])
                past, own, m[b, d] = np.exp(m[b, d] - w[d] - most), np.exp(k[b, t, d] - most), most
                S[b, d], n[b, d] = past * S[b, d] + own * v[b, t, d], past * n[b, d] + own
    return out, (S, n, m)
