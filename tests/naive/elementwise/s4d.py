"""S4D, token by token."""

import numpy as np


def s4d(x, dt_log, A_log, A_imag, C, D=None, scale=None, state=None):
    """h_t = e^(dt A) h_{t-1} + (e^(dt A) - 1) / A x_t; out_t = 2 Re(C scale h_t) + D x_t."""
    A = -np.exp(A_log) + 1j * A_imag
    step = np.exp(np.exp(dt_log)[:, None] * A)
    (B, T, width), scale = x.shape, 1.0 if scale is None else scale
    h = np.zeros((B, *A.shape), complex) if state is None else np.array(state, complex)
    out = np.zeros((B, T, width))
    for b in range(B):
        for t in range(T):
            for d in range(width):
                h[b, d] = step[d] * h[b, d] + (step[d] - 1) / A[d] * x[b, t, d]
                out[b, t, d] = 2 * (C[d] @ h[b, d]).real * scale + (0 if D is None else D[d] * x[b, t, d])
    return out, h
