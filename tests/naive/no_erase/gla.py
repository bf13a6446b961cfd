"""Gated linear attention, token by token."""

import numpy as np

from tests.naive.heads import head_of


def gla(q, k, v, g, gv=None, scale=None, state=None):
    """S_t = (e^(g_t)^T e^(gv_t)) (.) S_{t-1} + k_t^T v_t; o_t = scale q_t S_t.

    g (B, T, H, K), gv (B, T, H, V) or None: 0.
    """
    q, k, v, g = (np.asarray(x, np.float64) for x in (q, k, v, g))
    B, T, H, V = v.shape
    Hq, (Hk, K) = q.shape[2], k.shape[2:]
    H_out = max(Hq, H)
    scale = K**-0.5 if scale is None else scale
    gv = np.zeros((B, T, H, V)) if gv is None else np.asarray(gv, np.float64)
    S = np.zeros((B, H, K, V)) if state is None else np.array(state, np.float64)
    out = np.zeros((B, T, H_out, V))
    for b in range(B):
        for t in range(T):
            for h in range(H):
                k_t = k[b, t, head_of(h, Hk, H)]
                decay = np.outer(np.exp(g[b, t, h]), np.exp(gv[b, t, h]))
                S[b, h] = decay * S[b, h] + np.outer(k_t, v[b, t, h])
            for h in range(H_out):
                out[b, t, h] = scale * q[b, t, head_of(h, Hq, H_out)] @ S[b, head_of(h, H, H_out)]
    return out, S
