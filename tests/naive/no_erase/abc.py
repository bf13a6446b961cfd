"""ABC, token by token."""

import numpy as np

from tests.naive.no_erase.gsa import slots_by_token


def abc(q, k, v, s, scale=None, state=None):
    """Slots hold averages with the weights e^(s_t)."""
    q, k, v, s = (np.asarray(x, np.float64) for x in (q, k, v, s))
    N = np.zeros((s.shape[0], *s.shape[2:])) if state is None else np.array(state[2])
    write, keep = np.zeros_like(s), np.zeros_like(s)
    for t in range(s.shape[1]):
        more = N + np.exp(s[:, t])
        write[:, t], keep[:, t], N = np.exp(s[:, t]) / more, N / more, more
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out, S, W = slots_by_token(q, k, v, write, keep, scale, None if state is None else state[:2])
    return out, (S, W, N)
