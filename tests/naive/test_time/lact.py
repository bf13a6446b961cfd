"""LaCT, one token after the other and a step for each chunk."""

from types import SimpleNamespace

import numpy as np

from ..learners import learn

KELLER = [(3.4445, -4.7750, 2.0315)] * 5
LACT = [(4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037), (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012)]  # fmt: skip


def orthogonal(G, coefficients):
    """a s + b s^3 + c s^5 of the singular values s of G / |G|, once for each triple."""
    u, s, w = np.linalg.svd(G / (np.linalg.norm(G) + 1e-7), full_matrices=False)
    for a, b, c in coefficients:
        s = a * s + b * s**3 + c * s**5
    return (u * s) @ w


def sigmoid(y):
    """1 / (1 + e^{-y})."""
    return 0.5 * (1 + np.tanh(y / 2))


def lact(
    q, k, v, eta_A, eta_B, eta_W, mu, A, B, W, scale=None, state=None, mini_batch=2048, muon="lact", stacked=False
):
    """f(x) = (silu(x A) * x B) W; P = mean(mu) P - sum eta d, W = W + NS(P) with columns of their first lengths."""
    first = A, B, W

    def predict(h, w, x):
        y, u = x @ w[0], x @ w[1]
        return (y * sigmoid(y) * u) @ w[2]

    def gradient(h, w, x, target):
        y, u = x @ w[0], x @ w[1]
        s = sigmoid(y)
        dh = -w[2] @ target
        return np.outer(x, dh * u * s * (1 + y * (1 - s))), np.outer(x, dh * y * s), np.outer(y * s * u, -target)

    def step(at, start, now, M, total, g):
        rates = eta_A[at], eta_B[at], eta_W[at]
        return [w - eta * d for w, eta, d in zip(now, rates, g, strict=True)], M, total + mu[at]

    def close(at, start, now, M, total):
        P = [total / mini_batch * m + (w - a) for m, w, a in zip(M, now, start, strict=True)]
        steps = P
        if muon is not None:
            table = {"keller": KELLER, "lact": LACT}.get(muon, muon)
            parts = [np.hstack(P[:2])] if stacked else P[:2]
            both = np.hstack([orthogonal(p, table) for p in parts])
            steps = [both[:, : P[0].shape[1]], both[:, P[0].shape[1] :], orthogonal(P[2], table)]
        new = [a + s for a, s in zip(start, steps, strict=True)]
        h = at[-1]
        lengths = [
            np.linalg.norm(w0[h], axis=0) / (np.linalg.norm(w, axis=0) + 1e-5) for w, w0 in zip(new, first, strict=True)
        ]
        return [w * n for w, n in zip(new, lengths, strict=True)], P, 0.0

    rules = SimpleNamespace(
        predict=predict, gradient=gradient, step=step, close=close, read=lambda at, start, *_: start
    )
    scale = 1.0 if scale is None else scale
    return learn((q, k, v), first, state, scale, rules, mini_batch, momentum=1, has_sum=True)
