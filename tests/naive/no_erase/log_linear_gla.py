"""Log-linear gated linear attention, token by token."""

import numpy as np

from tests.naive.levels import token_by_level


def log_linear_gla(q, k, v, g, lam, scale=None, state=None):
    """S_l <- e^(g_t) S_l (+ k_t^T v_t, l = 0); o_t = scale sum_l lam_t[l] q_t S_l."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale

    def update(S, own, k_t, v_t, g_t):
        return np.exp(g_t) * S + own * np.outer(k_t, v_t)

    return token_by_level(update, q, lam, (k, v, g), scale, state)
