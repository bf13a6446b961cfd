"""Gated linear attention, token by token."""

import numpy as np

from tests.naive.loop import token_by_token


def gla(q, k, v, g, gv=None, scale=None, state=None):
    """S_t = (e^(g_t)^T e^(gv_t)) (.) S_{t-1} + k_t^T v_t; o_t = scale q_t S_t.

    g (B, T, H, K), gv (B, T, H, V) or None: 0.
    """
    gv = np.zeros(v.shape) if gv is None else gv
    scale = q.shape[-1] ** -0.5 if scale is None else scale

    def update(S, k_t, v_t, g_t, gv_t):
        return np.outer(np.exp(g_t), np.exp(gv_t)) * S + np.outer(k_t, v_t)

    return token_by_token(update, q, (k, v, g, gv), scale, state)
