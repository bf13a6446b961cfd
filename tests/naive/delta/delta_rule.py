"""The delta rule (DeltaNet), token by token."""

import numpy as np

from tests.naive.loop import token_by_token
from tests.naive.projections import lengths_out


def delta_rule(q, k, v, beta, scale=None, state=None, qk_l2norm=False):
    """S_t = S_{t-1} + beta_t k_t^T (v_t - k_t S_{t-1}); o_t = scale q_t S_t; beta (B, T, H)."""
    q, k = lengths_out(q, k, qk_l2norm)
    scale = q.shape[-1] ** -0.5 if scale is None else scale

    def update(S, k_t, v_t, beta_t):
        return S + beta_t * np.outer(k_t, v_t - k_t @ S)

    return token_by_token(update, q, (k, v, beta), scale, state)
