"""Random feature attention, token by token."""

import numpy as np

from tests.naive.features import fourier
from tests.naive.loop import head_of


def rfa(
    q, k, v, g=None, scale=None, state=None, num_features=64, seed=0, sigma=1.0, normalize=True, causal=True, eps=0.0
):
    """S_t = e^(g_t) S_{t-1} + (1 - e^(g_t)) phi(k_t)^T v_t, z_t the same with 1 for v_t; g None: S_{t-1} + ...

    o_t = scale phi(q_t) S_t / (scale phi(q_t) . z_t + eps). causal=False: every query reads the last state.
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    q, k = fourier(q, num_features, seed, sigma), fourier(k, num_features, seed, sigma)
    scale = 1.0 if scale is None else scale
    B, T, H, V = v.shape
    Tq, Hq = q.shape[1:3]
    Hk, M = k.shape[2:]
    H_out = max(Hq, H)
    S, z = np.zeros((B, H, M, V)), np.zeros((B, H, M))
    if state is not None:
        S, z = (np.array(part, np.float64) for part in state) if normalize else (np.array(state, np.float64), z)
    out = np.zeros((B, Tq, H_out, V))
    for b in range(B):
        for t in range(T):
            for h in range(H):
                keep, take = (1.0, 1.0) if g is None else (np.exp(g[b, t, h]), 1 - np.exp(g[b, t, h]))
                k_t = k[b, t, head_of(h, Hk, H)]
                S[b, h] = keep * S[b, h] + take * np.outer(k_t, v[b, t, h])
                z[b, h] = keep * z[b, h] + take * k_t
            if causal:
                read(q, S, z, out, b, t, scale, normalize, eps)
        for t in range(0 if causal else Tq):
            read(q, S, z, out, b, t, scale, normalize, eps)
    return out, ((S, z) if normalize else S)


def read(q, S, z, out, b, t, scale, normalize, eps):
    H_out, H, Hq = out.shape[2], S.shape[1], q.shape[2]
    for h in range(H_out):
        q_t, s = scale * q[b, t, head_of(h, Hq, H_out)], head_of(h, H, H_out)
        out[b, t, h] = q_t @ S[b, s] / ((q_t @ z[b, s] + eps) if normalize else 1)
