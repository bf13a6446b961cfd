"""Log-linear gated delta rule, token by token."""

import numpy as np

from tests.naive.levels import token_by_level


def log_linear_gated_delta_rule(q, k, v, g, beta, lam, scale=None, state=None):
    """S_l <- S~_l + beta_t k_t^T (v_t, l = 0, - k_t S~_l), S~_l = e^(g_t) S_l; o_t = scale sum_l lam_t[l] q_t S_l."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale

    def update(S, own, k_t, v_t, g_t, beta_t):
        S = np.exp(g_t) * S
        return S + beta_t * np.outer(k_t, own * v_t - k_t @ S)

    return token_by_level(update, q, lam, (k, v, g, beta), scale, state)
