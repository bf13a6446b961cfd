"""The states of log-linear attention, token by token."""

import numpy as np

from tests.naive.loop import head_of


def token_by_level(update, q, lam, arrays, scale, state):
    """(out, (S, position)): every level is updated, the token is written to level 0, levels are read, then merged.

    update(S, own, k_t, v_t, ...): the next state of a level; own: whether it takes in the value. After t + 1 tokens the
    levels below n = 1 + the number of trailing zero bits of t + 1 are added to n.
    """
    q, lam, *arrays = (np.asarray(x, np.float64) for x in (q, lam, *arrays))
    (B, T, Hq, K), H, V, levels = q.shape, arrays[1].shape[2], arrays[1].shape[-1], lam.shape[-1]
    H_out = max(Hq, H)
    S, position = np.zeros((B, H, levels + 1, K, V)), np.zeros(B, np.int64)
    if state is not None:
        S[:, :, 1:], position = np.array(state[0], np.float64), np.array(state[1], np.int64)
    out = np.zeros((B, T, H_out, V))
    for b in range(B):
        for t in range(T):
            for h in range(H):
                given = [x[b, t, head_of(h, x.shape[2], H)] for x in arrays]
                S[b, h] = [update(S[b, h, level], level == 0, *given) for level in range(levels + 1)]
            for h in range(H_out):
                s = head_of(h, H, H_out)
                read = np.einsum("l,lkv->kv", lam[b, t, s], S[b, s, :levels])
                out[b, t, h] = scale * q[b, t, head_of(h, Hq, H_out)] @ read
            position[b] += 1
            n = 1 + (int(position[b]) & -int(position[b])).bit_length() - 1
            S[b, :, n] += S[b, :, :n].sum(axis=1)
            S[b, :, :n] = 0
    return out, (S[:, :, 1:], position)
