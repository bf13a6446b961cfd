"""Diagonal plus low rank, token by token."""

import numpy as np

from tests.naive.loop import token_by_token


def dplr(q, k, v, g, a, b, scale=None, state=None):
    """S_t = diag(e^(g_t)) S_{t-1} + b_t^T (a_t S_{t-1}) + k_t^T v_t; o_t = scale q_t S_t; g (B, T, H, K)."""

    def update(S, k_t, v_t, g_t, a_t, b_t):
        return np.exp(g_t)[:, None] * S + np.outer(b_t, a_t @ S) + np.outer(k_t, v_t)

    return token_by_token(update, q, (k, v, g, a, b), 1.0 if scale is None else scale, state)
