"""MesaNet, token by token."""

import numpy as np

from tests.naive.loop import head_of


def mesa_net(q, k, v, g, beta, ridge, scale=None, state=None, solver="exact", iterations=None, tolerance=None):
    """Z_t = e^(g_t) Z_{t-1} + beta_t k_t^T k_t, S_t = e^(g_t) S_{t-1} + beta_t k_t^T v_t.

    x_t (Z_t + diag(ridge_t)) = q_t; o_t = scale x_t S_t.
    ridge (H, K) or (B, T, H, K). However the library solves, the definition solves exactly.
    """
    q, k, v, g, beta, ridge = (np.asarray(x, np.float64) for x in (q, k, v, g, beta, ridge))
    B, T, H, V = v.shape
    Hq, (Hk, K) = q.shape[2], k.shape[2:]
    H_out = max(Hq, H)
    scale = 1.0 if scale is None else scale
    S, Z = np.zeros((B, H, K, V)), np.zeros((B, H, K, K))
    if state is not None:
        S, Z = (np.array(part, np.float64) for part in state)
    out = np.zeros((B, T, H_out, V))
    for b in range(B):
        for t in range(T):
            for h in range(H):
                k_t, weight, keep = k[b, t, head_of(h, Hk, H)], beta[b, t, h], np.exp(g[b, t, h])
                Z[b, h] = keep * Z[b, h] + weight * np.outer(k_t, k_t)
                S[b, h] = keep * S[b, h] + weight * np.outer(k_t, v[b, t, h])
            for h in range(H_out):
                s = head_of(h, H, H_out)
                added = np.diag(ridge[s] if ridge.ndim == 2 else ridge[b, t, s])
                x = np.linalg.solve((Z[b, s] + added).T, q[b, t, head_of(h, Hq, H_out)])
                out[b, t, h] = scale * x @ S[b, s]
    return out, (S, Z)
