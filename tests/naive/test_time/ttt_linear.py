"""TTT-Linear, one token after the other."""

from types import SimpleNamespace

import numpy as np

from ..learners import learn, mixes, norm, norm_vjp


def ttt_linear(q, k, v, eta, W, b, weight, shift, gain=None, scale=None, state=None, mini_batch=16, read="after"):
    """f(x) = x + LN(x W + b); W, b <- W, b - eta_t d |f_A(k_t) - v_t|^2 / 2, A at the start of the mini-batch."""

    def predict(h, w, x):
        return x + norm(x @ w[0] + w[1], weight[h], shift[h])

    def gradient(h, w, x, target):
        dz = norm_vjp(x @ w[0] + w[1], weight[h], predict(h, w, x) - target)
        return np.outer(x, dz), dz

    def step(at, A, W, M, total, g):
        return [w - eta[at] * d for w, d in zip(W, g, strict=True)], M, total

    rules = SimpleNamespace(predict=predict, gradient=gradient, step=step, **mixes(gain, eta.shape, read))
    return learn((q, k, v), (W, b), state, 1.0 if scale is None else scale, rules, mini_batch)
