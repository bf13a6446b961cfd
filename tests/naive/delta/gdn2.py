"""Gated DeltaNet-2, token by token."""

import numpy as np

from tests.naive.loop import token_by_token
from tests.naive.projections import lengths_out, log_decay


def gdn2(q, k, v, g, b, w, A_log=None, dt_bias=None, scale=None, state=None, qk_l2norm=False):
    """S~ = diag(e^(g_t)) S_{t-1}; S_t = S~ + k_t^T (w_t v_t - (b_t k_t) S~); o_t = scale q_t S_t."""
    q, k = lengths_out(q, k, qk_l2norm)
    scale = q.shape[-1] ** -0.5 if scale is None else scale

    def update(S, k_t, v_t, g_t, b_t, w_t):
        S = np.exp(g_t)[:, None] * S
        return S + np.outer(k_t, w_t * v_t - (b_t * k_t) @ S)

    return token_by_token(update, q, (k, v, log_decay(g, A_log, dt_bias), b, w), scale, state)
