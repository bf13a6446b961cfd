"""mLSTM, token by token."""

import numpy as np

from tests.naive.loop import head_of


def mlstm(q, k, v, i, f, scale=None, state=None, soft_cap=None, forget_gate="sigmoid"):
    """C_t = f_t C_{t-1} + e^(i_t) k_t^T v_t, n_t likewise of k_t; h_t = scale q_t C_t / max(|scale q_t n_t|, 1).

    Stored are e^(-m) C, e^(-m) n and m, with m_t = max(log f_t + m_{t-1}, i_t).
    """
    q, k, v, i, f = (np.asarray(x, np.float64) for x in (q, k, v, i, f))
    B, T, H, V = v.shape
    Hq, (Hk, K) = q.shape[2], k.shape[2:]
    H_out = max(Hq, H)
    scale = K**-0.5 if scale is None else scale
    if soft_cap is not None:
        i, f = soft_cap * np.tanh(i / soft_cap), soft_cap * np.tanh(f / soft_cap)
    log_f = f if forget_gate == "exp" else -np.logaddexp(0, -f)
    S, n, m = np.zeros((B, H, K, V)), np.zeros((B, H, K)), np.zeros((B, H))
    if state is not None:
        S, n, m = (np.array(part, np.float64) for part in state)
    out = np.zeros((B, T, H_out, V))
    for b in range(B):
        for t in range(T):
            for h in range(H):
                k_t = k[b, t, head_of(h, Hk, H)]
                new = max(log_f[b, t, h] + m[b, h], i[b, t, h])
                keep, write = np.exp(log_f[b, t, h] + m[b, h] - new), np.exp(i[b, t, h] - new)
                S[b, h] = keep * S[b, h] + write * np.outer(k_t, v[b, t, h])
                n[b, h] = keep * n[b, h] + write * k_t
                m[b, h] = new
            for h in range(H_out):
                q_t, s = scale * q[b, t, head_of(h, Hq, H_out)], head_of(h, H, H_out)
                out[b, t, h] = q_t @ S[b, s] / max(abs(q_t @ n[b, s]), np.exp(-m[b, s]))
    return out, (S, n, m)
