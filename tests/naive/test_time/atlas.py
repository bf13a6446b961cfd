"""Atlas, one token after the other, each loss with its window."""

import numpy as np

from ..learners import gelu, gelu_slope
from ..loop import head_of
from .lact import KELLER, orthogonal


def atlas(
    q, k, v, share, eta, mu, g, W1, W2, scale=None, state=None, mini_batch=16, window=4, muon="keller", read="after"
):
    """S = mu S - eta sum_{window} share d |f_A(k_i) - v_i|^2, W = e^g W + NS(S), f(x) = gelu(x W1) W2."""
    (B, T, H, V), K, c = v.shape, k.shape[-1], window - 1
    if state is None:
        one, two = np.zeros((B, *W1.shape)), np.zeros((B, *W2.shape))
        state = (one, two) * 3 + (np.zeros((B, H, c, K)), np.zeros((B, H, c, V)), np.zeros((B, H, c)), np.zeros(B, int))
    ends, out = [np.array(S) for S in state], np.zeros(v.shape)
    table = {"keller": KELLER}.get(muon, muon)
    for b, h in np.ndindex(B, H):
        W, A = ([W1[h] + S[i][b, h], W2[h] + S[i + 1][b, h]] for S, i in ((state, 0), (state, 2)))
        M = [state[4][b, h], state[5][b, h]]
        seen = [(x, y, s) for x, y, s in zip(state[6][b, h], state[7][b, h], state[8][b, h], strict=True)]
        n = int(state[9][b])
        for t in range(T):
            seen.append((k[b, t, head_of(h, k.shape[2], H)], v[b, t, h], share[b, t, h]))
            d = [0 * w for w in W]
            for x, target, s in seen[-window:]:
                y = x @ A[0]
                e = 2 * s * (gelu(y) @ A[1] - target)
                d = [d[0] + np.outer(x, (A[1] @ e) * gelu_slope(y)), d[1] + np.outer(gelu(y), e)]
            M = [mu[b, t, h] * m - eta[b, t, h] * x for m, x in zip(M, d, strict=True)]
            steps = M if muon is None else [orthogonal(m, table) for m in M]
            new = [np.exp(g[b, t, h]) * w + s for w, s in zip(W, steps, strict=True)]
            if q is not None:
                R = new if read == "after" else W
                x = q[b, t, head_of(h, q.shape[2], H)]
                out[b, t, h] = (1.0 if scale is None else scale) * gelu(x @ R[0]) @ R[1]
            W = new
            if (n + t + 1) % mini_batch == 0:
                A = W
        last = seen[len(seen) - c :]
        parts = (
            W[0] - W1[h],
            W[1] - W2[h],
            A[0] - W1[h],
            A[1] - W2[h],
            *M,
            *(np.array(y) for y in zip(*last, strict=True)),
        )
        for S, y in zip(ends, parts, strict=False):
            S[b, h] = y
    ends[9] = ends[9] + T
    return out, tuple(ends)
