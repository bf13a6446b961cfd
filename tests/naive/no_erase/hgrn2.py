"""HGRN-2, token by token."""

import numpy as np

from tests.naive.loop import token_by_token


def hgrn2(q, v, g, scale=None, state=None):
    """S_t = diag(e^(g_t)) S_{t-1} + (1 - e^(g_t))^T v_t; o_t = scale q_t S_t."""

    def update(S, g_t, v_t):
        forget = np.exp(g_t)
        return forget[:, None] * S + np.outer(1 - forget, v_t)

    return token_by_token(update, q, (g, v), 1.0 if scale is None else scale, state)
