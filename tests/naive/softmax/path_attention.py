"""PaTH attention, one pair of a query and a key after the other."""

import numpy as np

from .softmax_attention import ring


def path_attention(q, k, v, w, beta, g=None, scale=None, state=None, window=None, normalize=True):
    """p_tj ~ e^{scale q_t H_t ... H_{j+1} k_j^T + g_t + ... + g_{j+1}}, H_t = I - beta_t w_t^T w_t."""
    (B, T, H, V), Hq, Hk, K = v.shape, q.shape[2], k.shape[2], q.shape[3]
    heads, scale = max(Hq, H), K**-0.5 if scale is None else scale
    g = np.zeros((B, T, Hq)) if g is None else g
    if state is None:
        state = np.zeros((B, 0, Hk, K)), np.zeros((B, 0, H, V)), np.zeros((B, 0, Hq)), np.zeros(B)
    out, ends = np.zeros((B, T, heads, V)), []
    L = state[0].shape[1]
    slots = L + T if window is None else max(min(L + T, window - 1), 1)
    for b in range(B):
        n = round(float(state[3][b]))
        old = range(max(0, n - L), n)
        keys, values, decays = ([S[b, p % L] for p in old] for S in state[:3])
        for t in range(T):
            maps = np.eye(K) - beta[b, t, :, None, None] * w[b, t, :, :, None] * w[b, t, :, None, :]  # (Hk, K, K)
            keys = [np.einsum("hk,hkl->hl", key, maps) for key in keys] + [k[b, t]]
            decays = [d + g[b, t] for d in decays] + [np.zeros(Hq)]
            values.append(v[b, t])
            first = 0 if window is None else max(len(keys) - window, 0)
            for h in range(heads):
                hq, hk, hv = (h // (heads // n) for n in (Hq, Hk, H))
                z = np.array([scale * q[b, t, hq] @ keys[j][hk] + decays[j][hq] for j in range(first, len(keys))])
                p = np.exp(z)
                p /= p.sum() if normalize else 1
                out[b, t, h] = sum(x * values[first + j][hv] for j, x in enumerate(p))
        ends.append(_end([S[b] for S in state[:3]], (keys, values, decays), (n, T, slots)))
    ends = ends or [
        [
            S[0]
            for S in path_attention(
                *(np.zeros((1, *x.shape[1:])) for x in (q, k, v, w, beta, g)),
                scale,
                tuple(np.zeros((1, *S.shape[1:])) for S in state),
                window,
            )[1]
        ]
    ]
    return out, tuple(np.stack(S)[: B or 0] for S in zip(*ends, strict=True))


def _end(state, seen, sizes):
    """The cache of one sequence after its tokens: all that was seen, in its slots."""
    n, T, slots = sizes
    parts = []
    for old, rows in zip(state, seen, strict=True):
        rows = np.array(rows).reshape(len(rows), *old.shape[1:])
        parts.append(ring(rows[:0], rows, n + T - len(rows), slots))
    return [*parts, np.float64(n + T)]
