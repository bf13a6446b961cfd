"""The loop over batch, tokens and heads that most recurrences share."""

import numpy as np


def head_of(head, heads, among):
    """Head `head` of `among` heads uses this one of `heads` heads (`heads` divides `among`)."""
    return head // (among // heads)


def token_by_token(update, q, arrays, scale, state):
    """(out, S) with S_t = update(S_{t-1}, k_t, v_t, ...) of every head and o_t = scale q_t S_t.

    arrays: k, v and what else `update` takes, (B, T, heads, ...); v has one head per state.
    """
    q, *arrays = (np.asarray(x, np.float64) for x in (q, *arrays))
    (B, T, Hq, K), H, V = q.shape, arrays[1].shape[2], arrays[1].shape[-1]
    H_out = max(Hq, H)
    S = np.zeros((B, H, K, V)) if state is None else np.array(state, np.float64)
    out = np.zeros((B, T, H_out, V))
    for b in range(B):
        for t in range(T):
            for h in range(H):
                S[b, h] = update(S[b, h], *(x[b, t, head_of(h, x.shape[2], H)] for x in arrays))
            for h in range(H_out):
                out[b, t, h] = scale * q[b, t, head_of(h, Hq, H_out)] @ S[b, head_of(h, H, H_out)]
    return out, S
