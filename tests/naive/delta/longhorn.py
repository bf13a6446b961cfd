"""Longhorn in its exact form, token by token."""

import numpy as np

from tests.naive.heads import head_of


def longhorn(q, k, v, beta, scale=None, state=None):
    """S_t = argmin |S - S_{t-1}|^2 + beta_t |k_t S - v_t|^2, by its normal equations; o_t = scale q_t S_t."""
    q, k, v, beta = (np.asarray(x, np.float64) for x in (q, k, v, beta))
    B, T, H, V = v.shape
    Hq, (Hk, K) = q.shape[2], k.shape[2:]
    H_out = max(Hq, H)
    scale = 1.0 if scale is None else scale
    S = np.zeros((B, H, K, V)) if state is None else np.array(state, np.float64)
    out = np.zeros((B, T, H_out, V))
    for b in range(B):
        for t in range(T):
            for h in range(H):
                k_t, weight = k[b, t, head_of(h, Hk, H)], beta[b, t, h]
                left = np.eye(K) + weight * np.outer(k_t, k_t)
                S[b, h] = np.linalg.solve(left, S[b, h] + weight * np.outer(k_t, v[b, t, h]))
            for h in range(H_out):
                out[b, t, h] = scale * q[b, t, head_of(h, Hq, H_out)] @ S[b, head_of(h, H, H_out)]
    return out, S
