"""DeltaProduct, token by token and step by step."""

import numpy as np

from tests.naive.heads import head_of
from tests.naive.projections import lengths_out, log_decay


def delta_product(q, k, v, beta, g=None, A_log=None, dt_bias=None, scale=None, state=None, qk_l2norm=False):
    """S = e^(g_t) S; n times S = S + k^T beta (v - k S); o_t = scale q_t S."""
    v, beta = (np.asarray(x, np.float64) for x in (v, beta))
    q, k = lengths_out(q, k, qk_l2norm)
    g = None if g is None else log_decay(g, A_log, dt_bias)
    B, T, n, H, V = v.shape
    Hq, (Hk, K) = q.shape[2], k.shape[3:]
    H_out = max(Hq, H)
    scale = K**-0.5 if scale is None else scale
    S = np.zeros((B, H, K, V)) if state is None else np.array(state, np.float64)
    out = np.zeros((B, T, H_out, V))
    for b in range(B):
        for t in range(T):
            for h in range(H):
                S[b, h] *= 1 if g is None else np.exp(g[b, t, h])
                for j in range(n):
                    k_j = k[b, t, j, head_of(h, Hk, H)]
                    S[b, h] += beta[b, t, j, h] * np.outer(k_j, v[b, t, j, h] - k_j @ S[b, h])
            for h in range(H_out):
                out[b, t, h] = scale * q[b, t, head_of(h, Hq, H_out)] @ S[b, head_of(h, H, H_out)]
    return out, S
