"""Mamba-3, token by token, with keys and queries rotated by the sum of all angles as the paper has them."""

import numpy as np

from tests.naive.loop import head_of
from tests.naive.no_erase.retnet import rotation


def mamba3(
    x, dt, A, B, C, trap, angle, D=None, z=None, dt_bias=None, scale=None, state=None, dt_softplus=False,
    dt_limit=(0.0, np.inf),
):  # fmt: skip
    """S_t = a_t S_{t-1} + b_t k_{t-1}^T x_{t-1} + c_t k_t^T x_t with a = e^(dt A), b = (1 - l) dt a, c = l dt.

    k_t = B_t R(theta_t), q_t = C_t R(theta_t), theta_t = theta_{t-1} + pi tanh(angle_t) dt_t; y_t = (scale q_t S_t +
    D x_t) silu(z_t). The state given and returned is in the frame of its token: rows rotated by -theta.
    """
    x, B, C, trap, angle = (np.asarray(y, np.float64) for y in (x, B, C, trap, angle))
    N, T, H, V = x.shape
    Hk, K = B.shape[2:]
    dt = dt + (0 if dt_bias is None else dt_bias)
    dt = np.clip(np.log1p(np.exp(dt)) if dt_softplus else dt, *dt_limit)
    A = np.broadcast_to(A, dt.shape)
    angle = angle if angle.ndim == 4 else np.repeat(angle[:, :, None], H, axis=2)
    D = np.zeros((H, V)) if D is None else D if D.ndim == 2 else np.repeat(D[:, None], V, axis=1)
    scale = 1.0 if scale is None else scale
    S, k, v = (np.zeros((N, H, K, V)), np.zeros((N, H, K)), np.zeros((N, H, V))) if state is None else (
        np.array(S, np.float64) for S in state)  # fmt: skip
    out, ends = np.zeros((N, T, H, V)), (S.copy(), k.copy(), v.copy())
    for n in range(N):
        for h in range(H):
            theta, S_h, k_h, v_h = np.zeros(angle.shape[-1]), S[n, h], k[n, h], v[n, h]
            for t in range(T):
                step, share = dt[n, t, h], 1 / (1 + np.exp(-trap[n, t, h]))
                theta = theta + np.pi * np.tanh(angle[n, t, h]) * step
                R = rotation(K, theta)
                k_t, q_t = B[n, t, head_of(h, Hk, H)] @ R, C[n, t, head_of(h, C.shape[2], H)] @ R
                decay = np.exp(step * A[n, t, h])
                S_h = decay * S_h + (1 - share) * step * decay * np.outer(k_h, v_h)
                S_h = S_h + share * step * np.outer(k_t, x[n, t, h])
                k_h, v_h = k_t, x[n, t, h]
                y = scale * q_t @ S_h + D[h] * v_h
                out[n, t, h] = y if z is None else y * z[n, t, h] / (1 + np.exp(-z[n, t, h]))
            back = rotation(K, -theta)
            for end, y in zip(ends, (back.T @ S_h, k_h @ back, v_h), strict=True):
                end[n, h] = y
    return out, ends
