"""Preconditioned gated delta rule, token by token."""

import numpy as np

from tests.naive.loop import head_of
from tests.naive.projections import log_decay


def preconditioned_gated_delta_rule(
    q, k, v, g, beta, g_square, beta_square, center=None, A_log=None, dt_bias=None, scale=None, state=None, span=1.5,
    eps=1e-6,
):  # fmt: skip
    """A_t = e^(a_t) A_{t-1} + b_t k_t^2; m_t = span^(-softsign(log(A_t + eps) - center)).

    S~ = e^(g_t) S_{t-1}; S_t = S~ + (m_t k_t)^T beta_t (v_t - k_t S~); o_t = scale q_t S_t.
    """
    q, k, v, beta, a, b = (np.asarray(x, np.float64) for x in (q, k, v, beta, g_square, beta_square))
    g = log_decay(g, A_log, dt_bias)
    (B, T, H, V), K = v.shape, k.shape[-1]
    Hq, Hk = q.shape[2], k.shape[2]
    H_out = max(Hq, H)
    scale = K**-0.5 if scale is None else scale
    center = np.full(H, -0.2) if center is None else center
    S, A = np.zeros((B, H, K, V)), np.zeros((B, H, K))
    if state is not None:
        S, A = (np.array(part, np.float64) for part in state)
    out = np.zeros((B, T, H_out, V))
    for n in range(B):
        for t in range(T):
            for h in range(H):
                key = k[n, t, head_of(h, Hk, H)]
                A[n, h] = np.exp(a[n, t, h]) * A[n, h] + b[n, t, h] * key**2
                r = np.log(A[n, h] + eps) - center[h]
                m = span ** (-r / (1 + abs(r)))
                decayed = np.exp(np.atleast_1d(g[n, t, h]))[:, None] * S[n, h]
                S[n, h] = decayed + np.outer(m * key, beta[n, t, h] * (v[n, t, h] - key @ decayed))
            for h in range(H_out):
                out[n, t, h] = scale * q[n, t, head_of(h, Hq, H_out)] @ S[n, head_of(h, H, H_out)]
    return out, (S, A)
