"""Linear attention with a gate for every entry of the state, token by token."""

import numpy as np

from tests.naive.loop import head_of


def matrix_gate(q, k, v, g, scale=None, state=None):
    """S_t = e^(g_t) (.) S_{t-1} + k_t^T v_t; o_t = scale q_t S_t."""
    N, T, H, V = v.shape
    K = k.shape[-1]
    scale = K**-0.5 if scale is None else scale
    S = np.zeros((N, H, K, V)) if state is None else np.array(state, np.float64)
    out = np.zeros((N, T, H, V))
    for n in range(N):
        for t in range(T):
            for h in range(H):
                S[n, h] = np.exp(g[n, t, h]) * S[n, h] + np.outer(k[n, t, head_of(h, k.shape[2], H)], v[n, t, h])
                out[n, t, h] = scale * q[n, t, head_of(h, q.shape[2], H)] @ S[n, h]
    return out, S
