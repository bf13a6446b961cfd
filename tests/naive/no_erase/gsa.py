"""Gated slot attention and attention with bounded memory control, token by token."""

import numpy as np

from tests.naive.loop import head_of


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def slots_by_token(q, k, v, write, keep, scale, state):
    """W <- W diag(keep_t) + k_t^T write_t; S <- diag(keep_t) S + write_t^T v_t; o_t = softmax(scale q_t W) S."""
    B, T, H, V = v.shape
    Hq, (Hk, K), M = q.shape[2], k.shape[2:], write.shape[3]
    H_out = max(Hq, H)
    S, W = (np.zeros((B, H, M, V)), np.zeros((B, H, K, M))) if state is None else (np.array(y) for y in state)
    out = np.zeros((B, T, H_out, V))
    for b in range(B):
        for t in range(T):
            for h in range(H):
                W[b, h] = W[b, h] * keep[b, t, h] + np.outer(k[b, t, head_of(h, Hk, H)], write[b, t, h])
                S[b, h] = keep[b, t, h][:, None] * S[b, h] + np.outer(write[b, t, h], v[b, t, h])
            for h in range(H_out):
                s = head_of(h, H, H_out)
                out[b, t, h] = softmax(scale * q[b, t, head_of(h, Hq, H_out)] @ W[b, s]) @ S[b, s]
    return out, S, W


def gsa(q, k, v, s, g=None, scale=None, state=None):
    """Slots add s_t times a token and decay by e^(g_t), or by 1 - s_t."""
    q, k, v, s = (np.asarray(x, np.float64) for x in (q, k, v, s))
    keep = 1 - s if g is None else np.exp(np.asarray(g, np.float64))
    out, S, W = slots_by_token(q, k, v, s, keep, q.shape[-1] ** -0.5 if scale is None else scale, state)
    return out, (S, W)
