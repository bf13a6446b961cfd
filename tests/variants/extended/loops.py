"""The loops of the new variants, token by token."""

import numpy as np

from tests.naive.delta.gated_delta_rule import gated_delta_rule
from tests.naive.loop import head_of, token_by_token


def sigmoid(x):
    return 1 / (1 + np.exp(-np.asarray(x, np.float64)))


def gated_output(q, k, v, g, z, scale=None, state=None):
    """S_t = e^(g_t) S_{t-1} + k_t^T v_t; o_t = sigmoid(z_t) scale q_t S_t."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out, end = token_by_token(lambda S, k_t, v_t, g_t: np.exp(g_t) * S + np.outer(k_t, v_t), q, (k, v, g), scale, state)
    return sigmoid(z) * out, end


def unpublished(q, k, v, g, scale=None, state=None):
    """S_t = diag(e^(g_t)) S_{t-1} + k_t^T v_t; o_t = scale q_t S_t."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale

    def update(S, k_t, v_t, g_t):
        return np.exp(g_t)[:, None] * S + np.outer(k_t, v_t)

    return token_by_token(update, q, (k, v, g), scale, state)


def silu_values(q, k, v, beta, scale=None, state=None):
    """S_t = S_{t-1} + beta_t k_t^T (silu(v_t) - k_t S_{t-1}); o_t = scale q_t S_t."""
    return gated_delta_rule(q, k, v * sigmoid(v), 0 * np.asarray(beta), beta, scale=scale, state=state)


def gated_readers(q, k, v, g, beta, z, scale=None, state=None):
    """S~ = e^(g_t) S_{t-1}; S_t = S~ + beta_t k_t^T (v_t - k_t S~); o_t = sigmoid(z_t) scale q_t S_t."""
    out, end = gated_delta_rule(q, k, v, g, beta, scale=scale, state=state)
    for h in range(out.shape[2]):
        out[:, :, h] *= sigmoid(z[:, :, head_of(h, z.shape[2], out.shape[2])])
    return out, end
