"""The momentum delta rule, one token after the other."""

import numpy as np

from ..loop import head_of


def momentum_delta_rule(q, k, v, g, beta, mu, eta=None, scale=None, state=None, predict="decayed"):
    """M = mu M + eta k^T (v - p S), S = e^g S + beta M, o = scale q S; p = e^g k, or k."""
    (B, T, H, V), K = v.shape, k.shape[-1]
    eta = np.ones(beta.shape) if eta is None else eta
    S, M = (np.zeros((B, H, K, V)), np.zeros((B, H, K, V))) if state is None else (np.array(y) for y in state)
    out = np.zeros(v.shape)
    for b, t, h in np.ndindex(B, T, H):
        at, key, alpha = (b, t, h), k[b, t, head_of(h, k.shape[2], H)], np.exp(g[b, t, h])
        p = alpha * key if predict == "decayed" else key
        M[b, h] = mu[at] * M[b, h] + eta[at] * np.outer(key, v[at] - p @ S[b, h])
        S[b, h] = alpha * S[b, h] + beta[at] * M[b, h]
        if q is not None:
            out[at] = (K**-0.5 if scale is None else scale) * q[b, t, head_of(h, q.shape[2], H)] @ S[b, h]
    return out, (S, M)
