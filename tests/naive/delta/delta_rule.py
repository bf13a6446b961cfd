"""The delta rule (DeltaNet), token by token."""

import numpy as np

from tests.naive.heads import head_of
from tests.naive.projections import lengths_out


def delta_rule(q, k, v, beta, scale=None, state=None, qk_l2norm=False):
    """S_t = S_{t-1} + beta_t k_t^T (v_t - k_t S_{t-1}); o_t = scale q_t S_t; beta (B, T, H)."""
    v, beta = (np.asarray(x, np.float64) for x in (v, beta))
    q, k = lengths_out(q, k, qk_l2norm)
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
                error = v[b, t, h] - k_t @ S[b, h]
                S[b, h] = S[b, h] + beta[b, t, h] * np.outer(k_t, error)
            for h in range(H_out):
                out[b, t, h] = scale * q[b, t, head_of(h, Hq, H_out)] @ S[b, head_of(h, H, H_out)]
    return out, S
