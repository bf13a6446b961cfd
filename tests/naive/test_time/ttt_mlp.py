"""TTT-MLP, one token after the other."""

from types import SimpleNamespace

import numpy as np

from ..learners import gelu, gelu_slope, learn, mixes, norm, norm_vjp


def ttt_mlp(
    q, k, v, eta, W1, b1, W2, b2, weight, shift, gain=None, scale=None, state=None, mini_batch=16, read="after"
):
    """f(x) = x + LN(gelu(x W1 + b1) W2 + b2); W <- W - eta_t d |f_A(k_t) - v_t|^2 / 2."""

    def predict(h, w, x):
        return x + norm(gelu(x @ w[0] + w[1]) @ w[2] + w[3], weight[h], shift[h])

    def gradient(h, w, x, target):
        y = x @ w[0] + w[1]
        dz = norm_vjp(gelu(y) @ w[2] + w[3], weight[h], predict(h, w, x) - target)
        dy = (w[2] @ dz) * gelu_slope(y)
        return np.outer(x, dy), dy, np.outer(gelu(y), dz), dz

    def step(at, A, W, M, total, g):
        return [w - eta[at] * d for w, d in zip(W, g, strict=True)], M, total

    rules = SimpleNamespace(predict=predict, gradient=gradient, step=step, **mixes(gain, eta.shape, read))
    return learn((q, k, v), (W1, b1, W2, b2), state, 1.0 if scale is None else scale, rules, mini_batch)
