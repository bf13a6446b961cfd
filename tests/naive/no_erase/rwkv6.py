"""RWKV-6, token by token."""

import numpy as np

from tests.naive.loop import head_of


def rwkv6(q, k, v, g, u, scale=None, state=None):
    """o_t = scale q_t (S_{t-1} + diag(u) k_t^T v_t); S_t = diag(e^(g_t)) S_{t-1} + k_t^T v_t.

    g (B, T, H, K), u (H, K).
    """
    q, k, v, g, u = (np.asarray(x, np.float64) for x in (q, k, v, g, u))
    B, T, H, V = v.shape
    Hq, (Hk, K) = q.shape[2], k.shape[2:]
    H_out = max(Hq, H)
    scale = 1.0 if scale is None else scale
    S = np.zeros((B, H, K, V)) if state is None else np.array(state, np.float64)
    out = np.zeros((B, T, H_out, V))
    for b in range(B):
        for t in range(T):
            for h in range(H_out):
                s = head_of(h, H, H_out)
                bonus = np.outer(u[s] * k[b, t, head_of(s, Hk, H)], v[b, t, s])
                out[b, t, h] = scale * q[b, t, head_of(h, Hq, H_out)] @ (S[b, s] + bonus)
            for h in range(H):
                k_t = k[b, t, head_of(h, Hk, H)]
                S[b, h] = np.exp(g[b, t, h])[:, None] * S[b, h] + np.outer(k_t, v[b, t, h])
    return out, S
