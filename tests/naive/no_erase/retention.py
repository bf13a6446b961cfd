"""Retention (RetNet), token by token."""

import numpy as np

from tests.naive.loop import token_by_token


def retention(q, k, v, g=None, scale=None, state=None):
    """S_t = e^g S_{t-1} + k_t^T v_t; o_t = scale q_t S_t; g (H,) or (H, K), None: log(1 - 2^(-5-h))."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    H, K = v.shape[2], q.shape[-1]
    g = np.array([np.log(1 - 2.0 ** (-5 - h)) for h in range(H)]) if g is None else np.asarray(g, np.float64)
    g = np.broadcast_to(g.reshape(H, -1), (*v.shape[:2], H, K))

    def update(S, k_t, v_t, g_t):
        return np.exp(g_t)[:, None] * S + np.outer(k_t, v_t)

    return token_by_token(update, q, (k, v, g), scale, state)
