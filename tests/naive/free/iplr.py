"""Identity plus low rank, token by token."""

import numpy as np

from tests.naive.loop import token_by_token


def iplr(q, k, v, a, b, scale=None, state=None):
    """S_t = S_{t-1} + b_t^T (a_t S_{t-1}) + k_t^T v_t; o_t = scale q_t S_t."""

    def update(S, k_t, v_t, a_t, b_t):
        return S + np.outer(b_t, a_t @ S) + np.outer(k_t, v_t)

    return token_by_token(update, q, (k, v, a, b), 1.0 if scale is None else scale, state)
