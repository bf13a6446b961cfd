"""Mamba-2 (SSD), token by token."""

import numpy as np

from tests.naive.loop import head_of


def mamba2(
    x, dt, A, B, C, D=None, z=None, dt_bias=None, scale=None, state=None, dt_softplus=False, dt_limit=(0.0, np.inf)
):
    """S_t = e^(dt_t A) S_{t-1} + B_t^T (dt_t x_t); y_t = (scale C_t S_t + D x_t) silu(z_t).

    x, z (batch, T, H, V); dt (batch, T, H); A, dt_bias (H,); B, C (batch, T, G, K); D (H,) or (H, V).
    The step is dt + dt_bias, through softplus if dt_softplus, then held within dt_limit.
    """
    x, dt, A, B, C = (np.asarray(array, np.float64) for array in (x, dt, A, B, C))
    batch, T, H, V = x.shape
    K = B.shape[3]
    scale = 1.0 if scale is None else scale
    S = np.zeros((batch, H, K, V)) if state is None else np.array(state, np.float64)
    out = np.zeros((batch, T, H, V))
    for n in range(batch):
        for t in range(T):
            for h in range(H):
                step = dt[n, t, h]
                if dt_bias is not None:
                    step = step + np.float64(dt_bias[h])
                if dt_softplus:
                    step = np.logaddexp(0, step)
                step = min(max(step, dt_limit[0]), dt_limit[1])
                B_t = B[n, t, head_of(h, B.shape[2], H)]
                C_t = C[n, t, head_of(h, C.shape[2], H)]
                S[n, h] = np.exp(step * A[h]) * S[n, h] + np.outer(B_t, step * x[n, t, h])
                y = scale * C_t @ S[n, h]
                if D is not None:
                    y = y + np.asarray(D[h], np.float64) * x[n, t, h]
                if z is not None:
                    z_t = np.asarray(z[n, t, h], np.float64)
                    y = y * z_t / (1 + np.exp(-z_t))
                out[n, t, h] = y
    return out, S
