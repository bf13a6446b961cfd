"""DeltaFormer, one pair of tokens after the other."""

import numpy as np

from .softmax_attention import read, ring


def widened(x, heads):
    """(..., heads, D), each head for its group."""
    return np.repeat(x, heads // x.shape[-2], axis=-2)


def deltaformer(q, k, v, beta, w=None, g=None, scale=None, state=None, normalize=True):
    """u_t = v_t - beta_t sum_{j<t} p_tj u_j;  out_t = sum_{j<=t} a_tj u_j."""
    (B, T, H, V), K, w = v.shape, q.shape[-1], k if w is None else w
    heads, scale = max(q.shape[2], H), K**-0.5 if scale is None else scale
    q, w, gates = widened(q, heads), widened(w, H), np.zeros((B, T, H)) if g is None else g
    L = 0 if state is None else state[0].shape[1]
    out = np.zeros((B, T, heads, V))
    ends = [np.zeros((B, L + T, *k.shape[2:])), np.zeros((B, L + T, H, V)), np.zeros((B, L + T, H)), np.zeros(B)]
    for b in range(B):
        n = 0 if state is None else round(float(state[-1][b]))
        old = range(max(0, n - L), n)
        keys, us, decays = ([state[part][b, p % L] for p in old] for part in range(3))
        for t in range(T):
            decays = [d + gates[b, t] for d in decays]
            predicted = np.zeros((H, V))
            for h in range(H):
                if any(d[h] > -np.inf for d in decays):
                    one = slice(h, h + 1)
                    read(predicted[one], w[b, t, one], [widened(x, H)[one] for x in keys], [u[one] for u in us],
                         [d[one] for d in decays], scale, None, normalize, None)  # fmt: skip
            keys.append(k[b, t])
            us.append(v[b, t] - beta[b, t][:, None] * predicted)
            decays.append(np.zeros(H))
            wide = [np.repeat(d, heads // H) for d in decays]
            read(out[b, t], q[b, t], keys, us, wide, scale, None, normalize, None)
        new = k[b], np.array(us[len(old) :]), np.array(decays[len(old) :])
        for part, rows in enumerate(new):
            before = np.zeros((0, *ends[part].shape[2:])) if state is None else state[part][b]
            if part == 2 and state is not None:
                before = before + gates[b].sum(axis=0)
            ends[part][b] = ring(before, rows.reshape(T, *ends[part].shape[2:]), n, L + T)
        ends[3][b] = n + T
    return out, tuple(ends)
