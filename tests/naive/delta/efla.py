"""Exact-flow linear attention, token by token."""

import numpy as np

from tests.naive.loop import token_by_token


def efla(q, k, v, beta, scale=None, state=None):
    """S_t = e^(-beta_t A) S_{t-1} + int_0^beta_t e^(-s A) ds k_t^T v_t with A = k_t^T k_t; o_t = scale q_t S_t."""
    scale = np.asarray(q).shape[-1] ** -0.5 if scale is None else scale

    def update(S, k_t, v_t, beta_t):
        rates, E = np.linalg.eigh(np.outer(k_t, k_t))
        rates = np.where(rates > 1e-9 * rates.max(), rates, 0)  # one is not 0
        small = beta_t * rates < 1e-9
        flow = np.where(small, beta_t, -np.expm1(-beta_t * rates) / np.where(small, 1, rates))
        return (E * np.exp(-beta_t * rates)) @ E.T @ S + (E * flow) @ E.T @ np.outer(k_t, v_t)

    return token_by_token(update, q, (k, v, beta), scale, state)
