"""The selective scan, token by token."""

import numpy as np


def selective_scan(x, dt, A, B, C, D=None, z=None, dt_bias=None, scale=None, state=None, dt_softplus=False,
                   dt_limit=(0.0, np.inf)):  # fmt: skip
    """h_t = e^(dt A) h_{t-1} + (dt x) B^T; y = scale h C + D x; out = y silu(z). Complex: 2 Re(h C)."""
    dt = dt + (0 if dt_bias is None else dt_bias)
    dt = np.clip(np.log1p(np.exp(dt)) if dt_softplus else dt, *dt_limit)
    scale = 1.0 if scale is None else scale
    out, ends = np.zeros(x.shape), []
    for n in range(len(x)):
        h = np.zeros(A.shape) if state is None else np.array(state[n])
        for t in range(x.shape[1]):
            h = np.exp(dt[n, t][:, None] * A) * h + (dt[n, t] * x[n, t])[:, None] * B[n, t]
            y = h @ C[n, t]
            y = scale * (2 * y.real if np.iscomplexobj(y) else y) + (0 if D is None else D * x[n, t])
            out[n, t] = y if z is None else y * z[n, t] / (1 + np.exp(-z[n, t]))
        ends.append(h)
    return out, np.array(ends).reshape(len(x), *A.shape)
