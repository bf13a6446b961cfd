"""HGRN-2, token by token."""

import numpy as np

from tests.naive.heads import head_of


def hgrn2(q, v, g, scale=None, state=None):
    """S_t = diag(e^(g_t)) S_{t-1} + (1 - e^(g_t))^T v_t; o_t = scale q_t S_t."""
    q, v, g = (np.asarray(x, np.float64) for x in (q, v, g))
    (B, T, H, V), K, Hq = v.shape, q.shape[3], q.shape[2]
    H_out = max(Hq, H)
    scale = 1.0 if scale is None else scale
    S = np.zeros((B, H, K, V)) if state is None else np.array(state, np.float64)
    out = np.zeros((B, T, H_out, V))
    for b in range(B):
        for t in range(T):
            for h in range(H):
                forget = np.exp(g[b, t, h])
                S[b, h] = forget[:, None] * S[b, h] + np.outer(1 - forget, v[b, t, h])
            for h in range(H_out):
                out[b, t, h] = scale * q[b, t, head_of(h, Hq, H_out)] @ S[b, head_of(h, H, H_out)]
    return out, S
