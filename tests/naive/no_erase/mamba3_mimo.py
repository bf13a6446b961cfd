"""Mamba-3 with R inputs and outputs, token by token, with keys and queries rotated by the sum of all angles."""

import numpy as np

from tests.naive.loop import head_of
from tests.naive.no_erase.retnet import rotation


def mamba3_mimo(
    x, dt, A, B, C, trap, angle, mimo_x, mimo_o, D=None, z=None, mimo_z=None, dt_bias=None, scale=None, state=None,
    dt_softplus=False, dt_limit=(0.0, np.inf),
):  # fmt: skip
    """S_t = a_t S_{t-1} + b_t sum_r k_{t-1,r}^T x_{t-1,r} + c_t sum_r k_tr^T x_tr, x_tr = mimo_x_r x_t.

    y_tr = (scale q_tr S_t + D x_tr) silu(mimo_z_r z_t); out_t = sum_r mimo_o_r y_tr. Angles, weights and the frame of
    the state are those of mamba3.
    """
    x, B, C, trap, angle = (np.asarray(y, np.float64) for y in (x, B, C, trap, angle))
    (N, T, H, V), (R, Hk, K) = x.shape, B.shape[2:]
    dt = dt + (0 if dt_bias is None else dt_bias)
    dt = np.clip(np.log1p(np.exp(dt)) if dt_softplus else dt, *dt_limit)
    A = np.broadcast_to(A, dt.shape)
    D, scale = np.zeros(H) if D is None else D, 1.0 if scale is None else scale
    mimo_z = np.ones((H, R, V)) if mimo_z is None else mimo_z
    S, k, v = (np.zeros((N, H, K, V)), np.zeros((N, H, R, K)), np.zeros((N, H, R, V))) if state is None else (
        np.array(S, np.float64) for S in state)  # fmt: skip
    out, ends = np.zeros((N, T, H, V)), (S.copy(), k.copy(), v.copy())
    for n in range(N):
        for h in range(H):
            theta, S_h, k_h, v_h = np.zeros(angle.shape[-1]), S[n, h], k[n, h], v[n, h]
            for t in range(T):
                step, share = dt[n, t, h], 1 / (1 + np.exp(-trap[n, t, h]))
                theta = theta + np.pi * np.tanh(angle[n, t, h]) * step
                turn, decay = rotation(K, theta), np.exp(step * A[n, t, h])
                keys = [B[n, t, r, head_of(h, Hk, H)] @ turn for r in range(R)]
                values = [mimo_x[h, r] * x[n, t, h] for r in range(R)]
                S_h = decay * S_h
                for r in range(R):
                    S_h = S_h + (1 - share) * step * decay * np.outer(k_h[r], v_h[r])
                    S_h = S_h + share * step * np.outer(keys[r], values[r])
                k_h, v_h = keys, values
                for r in range(R):
                    q = C[n, t, r, head_of(h, C.shape[3], H)] @ turn
                    y, gate = scale * q @ S_h + D[h] * values[r], 1.0
                    if z is not None:
                        raw = mimo_z[h, r] * z[n, t, h]
                        gate = raw / (1 + np.exp(-raw))
                    out[n, t, h] += mimo_o[h, r] * y * gate
            back = rotation(K, -theta)
            for end, y in zip(ends, (back.T @ S_h, np.asarray(k_h) @ back, np.asarray(v_h)), strict=True):
                end[n, h] = y
    return out, ends
