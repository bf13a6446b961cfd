"""RetNet as it is published, in complex numbers, token by token."""

import numpy as np

from tests.naive.heads import head_of


def turn(K, theta):
    """The matrix R with x R^t = x of position t: pairs of channels turned by theta."""
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
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    B, T, H, V = v.shape
    Hq, (Hk, K) = q.shape[2], k.shape[2:]
    H_out = max(Hq, H)
    scale = K**-0.5 if scale is None else scale
    g = np.log(1 - 2.0 ** (-5 - np.arange(H))) if g is None else np.asarray(g, np.float64)
    g = np.repeat(g[:, None], K, axis=1) if g.ndim == 1 else g
    if xpos:
        P = K // 2
        extra = np.log((np.arange(P) / max(P, 1) + 0.4) / 1.4) / 512
        g = g + np.concatenate([np.repeat(extra, 2), np.zeros(K - 2 * P)])
    R = turn(K, angles(K, theta))
    S = np.zeros((B, H, K, V)) if state is None else np.array(state, np.float64)
    out = np.zeros((B, T, H_out, V))
    for b in range(B):
        for t in range(T):
            for h in range(H):
                S[b, h] = R @ S[b, h]
                S[b, h] = np.exp(g[h])[:, None] * S[b, h] + np.outer(k[b, t, head_of(h, Hk, H)], v[b, t, h])
            for h in range(H_out):
                out[b, t, h] = scale * q[b, t, head_of(h, Hq, H_out)] @ S[b, head_of(h, H, H_out)]
    return out, S
