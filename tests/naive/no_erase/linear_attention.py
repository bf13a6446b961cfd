"""Linear attention, token by token."""

import numpy as np

from tests.naive import features
from tests.naive.loop import head_of


def elu_plus_one(x):
    return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))


def relu(x):
    return np.maximum(x, 0)


def silu(x):
    return x / (1 + np.exp(-x))


NAMED_MAPS = {
    "identity": lambda x: x,
    "elu+1": elu_plus_one,
    "relu": relu,
    "silu": silu,
    "exp": np.exp,
    "t2r": relu,
    "hedgehog": features.softmax_pair,
    "dpfp": features.dpfp,
    "taylor": features.taylor,
    "rebased": lambda x: features.square(features.layer_norm(x)),
    "favor+": features.favor,
    "favor+ hyperbolic": lambda x: features.favor(x, hyperbolic=True),
    "fourier": features.fourier,
}


def one_map(feature_map):
    """A name, or a pair (f, f_vjp): the function f itself."""
    return NAMED_MAPS[feature_map] if isinstance(feature_map, str) else feature_map[0]


def two_maps(feature_map):
    """The map of q and the map of k. A pair of callables is one map (f, f_vjp); any other pair is (q map, k map)."""
    if isinstance(feature_map, str) or all(callable(part) for part in feature_map):
        return one_map(feature_map), one_map(feature_map)
    return one_map(feature_map[0]), one_map(feature_map[1])


def linear_attention(q, k, v, scale=None, state=None, feature_map="identity", normalize=False, causal=True, eps=0.0):
    """S_t = S_{t-1} + phi(k_t)^T v_t; o_t = scale phi(q_t) S_t.

    normalize: z_t = z_{t-1} + phi(k_t); o_t = scale phi(q_t) S_t / (scale phi(q_t) . z_t + eps), and 0 for x / 0.
    causal=False: every query reads the last state.
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    map_q, map_k = two_maps(feature_map)
    q, k = map_q(q), map_k(k)
    scale = 1.0 if scale is None else scale
    B, T, H, V = v.shape
    Tq, Hq = q.shape[1:3]
    Hk, K = k.shape[2:]
    H_out = max(Hq, H)
    S, z = np.zeros((B, H, K, V)), np.zeros((B, H, K))
    if state is not None and normalize:
        S, z = (np.array(part, np.float64) for part in state)
    elif state is not None:
        S = np.array(state, np.float64)
    out = np.zeros((B, Tq, H_out, V))

    def write(b, t):
        for h in range(H):
            k_t = k[b, t, head_of(h, Hk, H)]
            S[b, h] += np.outer(k_t, v[b, t, h])
            z[b, h] += k_t

    def read(b, t):
        for h in range(H_out):
            q_t = q[b, t, head_of(h, Hq, H_out)]
            s = head_of(h, H, H_out)
            out[b, t, h] = scale * q_t @ S[b, s]
            if normalize:
                below = scale * q_t @ z[b, s] + eps
                out[b, t, h] = out[b, t, h] / below if below != 0 else 0

    for b in range(B):
        if causal:
            for t in range(T):
                write(b, t)
                read(b, t)
        else:
            for t in range(T):
                write(b, t)
            for t in range(Tq):
                read(b, t)
    return out, ((S, z) if normalize else S)
