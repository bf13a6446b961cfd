"""RetNet as it is published, in complex numbers, token by token."""

import numpy as np

from tests.naive.loop import token_by_token


def rotation(K, theta):
    """The matrix R with x R^t = x of position t: pairs of channels rotated by theta."""
    R = np.eye(K)
    for p, angle in enumerate(theta):
        c, s = np.cos(angle), np.sin(angle)
        R[2 * p : 2 * p + 2, 2 * p : 2 * p + 2] = [[c, s], [-s, c]]
    return R


def angles(K, theta):
    P = K // 2
    return 10000.0 ** -(np.arange(P) / max(P - 1, 1)) if theta is None else np.asarray(theta, np.float64)


def retnet(q, k, v, g=None, theta=None, scale=None, state=None, xpos=False):
    """S is always in the frame of the token that is read: S <- R^T S, then decay, then write; o_t = scale q_t S_t."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    H, K = v.shape[2], q.shape[-1]
    g = np.log(1 - 2.0 ** (-5 - np.arange(H))) if g is None else np.asarray(g, np.float64)
    g = np.repeat(g[:, None], K, axis=1)
    if xpos:
        P = K // 2
        extra = np.log((np.arange(P) / max(P, 1) + 0.4) / 1.4) / 512
        g = g + np.concatenate([np.repeat(extra, 2), np.zeros(K - 2 * P)])
    g, R = np.broadcast_to(g, (*v.shape[:2], H, K)), rotation(K, angles(K, theta))

    def update(S, k_t, v_t, g_t):
        return np.exp(g_t)[:, None] * (R @ S) + np.outer(k_t, v_t)

    return token_by_token(update, q, (k, v, g), scale, state)
