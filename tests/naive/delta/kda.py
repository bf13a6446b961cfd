"""Kimi delta attention, token by token."""

import numpy as np

from tests.naive.heads import head_of
from tests.naive.projections import lengths_out, log_decay


def kda(q, k, v, g, beta, A_log=None, dt_bias=None, scale=None, state=None, qk_l2norm=False):
    """S~ = diag(e^(g_t)) S_{t-1}; S_t = S~ + beta_t k_t^T (v_t - k_t S~); o_t = scale q_t S_t; g (B, T, H, K)."""
    v, beta = (np.asarray(x, np.float64) for x in (v, beta))
    q, k = lengths_out(q, k, qk_l2norm)
    g = log_decay(g, A_log, dt_bias)
    B, T, H, V = v.shape
    Hq, (Hk, K) = q.shape[2], k.shape[2:]
    H_out = max(Hq, H)
    scale = K**-0.5 if scale is None else scale
    S = np.zeros((B, H, K, V)) if state is None else np.array(state, np.float64)
    out = np.zeros((B, T, H_out, V))
    for b in range(B):
        for t in range(T):
            for h in range(H):
                k_t = k[b, t, head_of(h, Hk, H)]
                kept = np.exp(g[b, t, h])[:, None] * S[b, h]
                error = v[b, t, h] - k_t @ kept
                S[b, h] = kept + beta[b, t, h] * np.outer(k_t, error)
            for h in range(H_out):
                out[b, t, h] = scale * q[b, t, head_of(h, Hq, H_out)] @ S[b, head_of(h, H, H_out)]
    return out, S
