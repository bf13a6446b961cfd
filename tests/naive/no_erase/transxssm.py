"""TransXSSM, token by token."""

import numpy as np

from tests.naive.loop import head_of
from tests.naive.no_erase.retnet import angles, rotation


def transxssm(
    x,
    dt,
    A,
    B,
    C,
    D=None,
    z=None,
    dt_bias=None,
    theta=None,
    scale=None,
    state=None,
    dt_softplus=False,
    dt_limit=(0.0, np.inf),
):
    """S_t = e^(dt_t A) R S_{t-1} + B_t^T (dt_t x_t); o_t = (scale C_t S_t + D x_t) silu(z_t)."""
    x, dt, A, B, C = (np.asarray(y, np.float64) for y in (x, dt, A, B, C))
    N, T, H, V = x.shape
    Hk, K = B.shape[2:]
    dt = dt + (0 if dt_bias is None else dt_bias)
    dt = np.clip(np.log1p(np.exp(dt)) if dt_softplus else dt, *dt_limit)
    D = np.zeros((H, V)) if D is None else D if D.ndim == 2 else np.repeat(D[:, None], V, axis=1)
    scale = 1.0 if scale is None else scale
    R = rotation(K, angles(K, theta))
    S = np.zeros((N, H, K, V)) if state is None else np.array(state, np.float64)
    out = np.zeros((N, T, H, V))
    for n in range(N):
        for t in range(T):
            for h in range(H):
                step = dt[n, t, h]
                write = np.outer(B[n, t, head_of(h, Hk, H)], step * x[n, t, h])
                S[n, h] = np.exp(step * A[h]) * (R @ S[n, h]) + write
                y = scale * C[n, t, head_of(h, C.shape[2], H)] @ S[n, h] + D[h] * x[n, t, h]
                gate = 1 if z is None else z[n, t, h] / (1 + np.exp(-z[n, t, h]))
                out[n, t, h] = y * gate
    return out, S
