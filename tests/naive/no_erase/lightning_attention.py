"""Lightning attention, token by token, with its three published slope rules."""

import numpy as np

from tests.naive.loop import token_by_token


def alibi_slopes(H):
    """2^(-8 (h+1) / H) for H a power of two; else the slopes of the lower power P, then every other one of 2 P."""
    P = 1
    while 2 * P <= H:
        P = 2 * P
    slopes = [2.0 ** (-8 * (h + 1) / P) for h in range(P)]
    doubled = [2.0 ** (-8 * (h + 1) / (2 * P)) for h in range(2 * P)]
    return np.array(slopes + doubled[0::2][: H - P])


def slopes_by_name(name, H, layer, num_layers):
    if name == "lightning":
        depth = 0.0 if num_layers == 1 else layer / (num_layers - 1)
        return alibi_slopes(H) * (1 - depth + 1e-5)
    if name == "minimax":
        slopes = np.array([2.0 ** (-8 * (h + 1) / H) for h in range(H)])
        return slopes * (1 - layer / (num_layers - 1 + 1e-5) + 1e-5)
    if name == "fla":
        return np.array([8 / H * h * (1 - layer / num_layers) for h in range(H)])
    raise ValueError(name)


def lightning_attention(q, k, v, slopes=None, scale=None, state=None, layer=0, num_layers=1):
    """S_t = e^(-slope) S_{t-1} + k_t^T v_t; o_t = scale q_t S_t; slopes (H,) or a rule's name, None: "lightning"."""
    H = v.shape[2]
    if slopes is None or isinstance(slopes, str):
        slopes = slopes_by_name(slopes or "lightning", H, layer, num_layers)
    slopes = np.broadcast_to(slopes, v.shape[:3])

    def update(S, k_t, v_t, slope):
        return np.exp(-slope) * S + np.outer(k_t, v_t)

    return token_by_token(update, q, (k, v, slopes), 1.0 if scale is None else scale, state)
