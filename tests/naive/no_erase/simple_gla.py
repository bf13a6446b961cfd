"""Simple gated linear attention, token by token."""

import numpy as np

from tests.naive.loop import token_by_token


def simple_gla(q, k, v, g, scale=None, state=None):
    """S_t = e^(g_t) S_{t-1} + k_t^T v_t; o_t = scale q_t S_t; g (B, T, H)."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale

    def update(S, k_t, v_t, g_t):
        return np.exp(g_t) * S + np.outer(k_t, v_t)

    return token_by_token(update, q, (k, v, g), scale, state)
