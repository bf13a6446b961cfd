"""Longhorn in its exact form, token by token."""

import numpy as np

from tests.naive.loop import token_by_token


def longhorn(q, k, v, beta, scale=None, state=None):
    """S_t = argmin |S - S_{t-1}|^2 + beta_t |k_t S - v_t|^2, by its normal equations; o_t = scale q_t S_t."""

    def update(S, k_t, v_t, beta_t):
        left = np.eye(len(k_t)) + beta_t * np.outer(k_t, k_t)
        return np.linalg.solve(left, S + beta_t * np.outer(k_t, v_t))

    return token_by_token(update, q, (k, v, beta), 1.0 if scale is None else scale, state)
