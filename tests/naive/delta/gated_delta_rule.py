"""The gated delta rule (Gated DeltaNet), token by token."""

import numpy as np

from tests.naive.loop import token_by_token
from tests.naive.projections import lengths_out, log_decay


def gated_delta_rule(q, k, v, g, beta, A_log=None, dt_bias=None, scale=None, state=None, qk_l2norm=False):
    """S~ = e^(g_t) S_{t-1}; S_t = S~ + beta_t k_t^T (v_t - k_t S~); o_t = scale q_t S_t; g, beta (B, T, H)."""
    q, k = lengths_out(q, k, qk_l2norm)
    g = log_decay(g, A_log, dt_bias)
    scale = q.shape[-1] ** -0.5 if scale is None else scale

    def update(S, k_t, v_t, g_t, beta_t):
        S = np.exp(g_t) * S
        return S + beta_t * np.outer(k_t, v_t - k_t @ S)

    return token_by_token(update, q, (k, v, g, beta), scale, state)
