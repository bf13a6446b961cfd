"""Decaying fast weights, token by token: gla with both decays and scale 1."""

from tests.naive.no_erase.gla import gla


def dfw(q, k, v, g, gv, scale=None, state=None):
    """S_t = (e^(g_t)^T e^(gv_t)) (.) S_{t-1} + k_t^T v_t; o_t = scale q_t S_t."""
    return gla(q, k, v, g, gv, 1.0 if scale is None else scale, state)
