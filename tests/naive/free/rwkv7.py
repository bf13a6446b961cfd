"""RWKV-7, token by token: the recurrence of dplr."""

from tests.naive.free.dplr import dplr


def rwkv7(q, k, v, g, a, b, scale=None, state=None):
    """S_t = diag(e^(g_t)) S_{t-1} + b_t^T (a_t S_{t-1}) + k_t^T v_t; o_t = scale q_t S_t; g (B, T, H, K)."""
    return dplr(q, k, v, g, a, b, scale, state)
