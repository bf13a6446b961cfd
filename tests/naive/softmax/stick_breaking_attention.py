"""Stick-breaking attention, key by key from the newest."""

import numpy as np

from .softmax_attention import ring


def stick_breaking_attention(q, k, v, scale=None, state=None, attend_current=False):
    """s_tj = sigmoid(scale q_t . k_j);  a_tj = s_tj prod_{j<i<t} (1 - s_ti);  out_t = sum_{j<t} a_tj v_j."""
    (B, T, H, V), heads, scale = v.shape, max(q.shape[2], v.shape[2]), q.shape[-1] ** -0.5 if scale is None else scale
    L = 0 if state is None else state[0].shape[1]
    out = np.zeros((B, T, heads, V))
    ends = [np.zeros((B, L + T, *k.shape[2:])), np.zeros((B, L + T, H, V)), np.zeros(B)]
    for b in range(B):
        n = 0 if state is None else round(float(state[-1][b]))
        keys, values = ([state[part][b, p % L] for p in range(max(0, n - L), n)] for part in range(2))
        for t in range(T):
            if attend_current:
                keys, values = [*keys, k[b, t]], [*values, v[b, t]]
            for h in range(heads):
                left, query = 1.0, q[b, t, h * q.shape[2] // heads]
                for key, value in zip(reversed(keys), reversed(values), strict=True):
                    share = 1 / (1 + np.exp(-scale * query @ key[h * len(key) // heads]))
                    out[b, t, h] += left * share * value[h * H // heads]
                    left *= 1 - share
            if not attend_current:
                keys, values = [*keys, k[b, t]], [*values, v[b, t]]
        for part, rows in enumerate((k[b], v[b])):
            before = np.zeros((0, *rows.shape[1:])) if state is None else state[part][b]
            ends[part][b] = ring(before, rows, n, L + T)
        ends[2][b] = n + T
    return out, tuple(ends)
