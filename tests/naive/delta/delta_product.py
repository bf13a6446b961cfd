"""DeltaProduct, token by token and step by step."""

import numpy as np

from tests.naive.loop import token_by_token
from tests.naive.projections import lengths_out, log_decay


def delta_product(q, k, v, beta, g=None, A_log=None, dt_bias=None, scale=None, state=None, qk_l2norm=False):
    """S = e^(g_t) S; n times S = S + k^T beta (v - k S); o_t = scale q_t S."""
    q, k = lengths_out(q, k, qk_l2norm)
    g = np.zeros(v.shape[:2] + v.shape[3:4]) if g is None else log_decay(g, A_log, dt_bias)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    k, v, beta = (np.moveaxis(x, 2, 3) for x in (k, v, beta))  # (B, T, heads, n, ...)

    def update(S, k_t, v_t, beta_t, g_t):
        S = np.exp(g_t) * S
        for k_j, v_j, beta_j in zip(k_t, v_t, beta_t, strict=True):
            S = S + beta_j * np.outer(k_j, v_j - k_j @ S)
        return S

    return token_by_token(update, q, (k, v, beta, g), scale, state)
