"""Householder positions: queries and keys token by token, then softmax attention."""

import numpy as np

from .softmax_attention import attend


def householder_positions(q, k, v, w, beta, scale=None, state=None, window=None, normalize=True):
    """P_t = (I - beta_t w_t^T w_t) P_{t-1}; p_tj ~ e^{scale (q_t P_t) . (k_j P_j)}; out_t = sum_j p_tj v_j."""
    (B, T, Hk, K), Hq = k.shape, q.shape[2]
    P = np.tile(np.eye(K), (B, Hk, 1, 1)) if state is None else np.array(state[2])
    heads = max(Hq, Hk)
    mapped_q, mapped_k = np.zeros((B, T, heads, K)), np.zeros((B, T, Hk, K))
    for t in range(T):
        for b in range(B):
            for h in range(Hk):
                P[b, h] = P[b, h] - beta[b, t, h] * np.outer(w[b, t, h], w[b, t, h] @ P[b, h])
                mapped_k[b, t, h] = k[b, t, h] @ P[b, h]
            for h in range(heads):
                mapped_q[b, t, h] = q[b, t, h // (heads // Hq)] @ P[b, h // (heads // Hk)]
    cache = None if state is None else (state[0], state[1], state[3])
    out, end = attend(mapped_q, mapped_k, v, None, cache, K**-0.5 if scale is None else scale, window, normalize)
    return out, (*end[:2], P, end[2])
