"""The loop of test-time learners over batch, heads and tokens: one gradient at a time, each written out."""

import numpy as np

from .loop import head_of


def learn(tokens, initial, state, scale, rules, mini_batch=1, momentum=0, has_sum=False):
    """(out, state) of a learner. tokens: q, k, v (B, T, heads, ...); initial: arrays (H, ...) that learn.

    rules: functions of one head. predict(h, w, x) -> y. gradient(h, w, k, v) -> dl/dw. step(at, A, W, M, g) -> (W, M),
    at being (b, t, h). read(at, A, before, after) -> the weights that the query reads. close(at, A, W, M, s) -> (W, M)
    at the end of a mini-batch, whose weights W the next one begins with; s: (b, h) and its first token that is known.
    state: W - W_0 of each array, the same when the mini-batch began, momenta, (sums), length.
    """
    q, k, v = tokens
    (B, T, H), P = v.shape[:3], len(initial)
    out, ends = np.zeros(v.shape), []
    if state is None:
        none = [np.zeros((B, *w.shape)) for w in initial]
        sums = [np.zeros((B, H))] if has_sum else []
        state = (*none, *none, *(none * momentum), *sums, np.zeros(B, np.int64))
    ends = [np.array(S) for S in state]
    for b in range(B):
        n = int(state[-1][b])
        for h in range(H):
            W, A = ([w0[h] + S[b, h] for w0, S in zip(initial, state[i:], strict=False)] for i in (0, P))
            M = [S[b, h] for S in state[2 * P : (2 + momentum) * P]]
            total = state[-2][b, h] if has_sum else 0.0
            for t in range(T):
                at = b, t, h
                key, value = k[b, t, head_of(h, k.shape[2], H)], v[at]
                new, M, total = rules.step(at, A, W, M, total, rules.gradient(h, A, key, value))
                if q is not None:
                    R = rules.read(at, A, W, new)
                    out[at] = scale * rules.predict(h, R, q[b, t, head_of(h, q.shape[2], H)])
                W = new
                if (n + t + 1) % mini_batch == 0:
                    A, M, total = rules.close(at, A, W, M, total)
                    W = A
            for i, tree in enumerate((W, A)):
                for S, w, w0 in zip(ends[P * i :], tree, initial, strict=False):
                    S[b, h] = w - w0[h]
            for S, w in zip(ends[2 * P :], M, strict=False):
                S[b, h] = w
            if has_sum:
                ends[-2][b, h] = total
        ends[-1][b] = n + T
    return out, tuple(ends)


def norm(z, gamma, beta, eps=1e-6):
    """gamma (z - mean) / sqrt(var + eps) + beta."""
    return gamma * (z - z.mean()) / np.sqrt(z.var() + eps) + beta


def norm_vjp(z, gamma, e, eps=1e-6):
    """The gradient of z, from the derivative of every output by every input."""
    n, s, x = len(z), np.sqrt(z.var() + eps), z - z.mean()
    jacobian = (np.eye(n) - 1 / n) / s - np.outer(x, x) / (n * s**3)  # d x^_i / d z_j
    return (gamma * e) @ jacobian


def gelu(x):
    """x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) / 2."""
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def gelu_slope(x):
    """gelu'(x)."""
    c = np.sqrt(2 / np.pi)
    t = np.tanh(c * (x + 0.044715 * x**3))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * c * (1 + 3 * 0.044715 * x**2)


def mixes(gain, shape, read):
    """The rules of A + gain_t (W_t - A): what a query reads, and what the next mini-batch begins with."""
    gain = np.ones(shape) if gain is None else gain

    def mix(at, A, W):
        return [a + gain[at] * (w - a) for a, w in zip(A, W, strict=True)]

    return {
        "read": lambda at, A, before, after: mix(at, A, after if read == "after" else before),
        "close": lambda at, A, W, M, total: (mix(at, A, W), M, total),
    }


def momentum_step(eta, mu, g):
    """S = mu S - eta d, W = e^g W + S."""

    def step(at, A, W, M, total, d):
        M = [mu[at] * m - eta[at] * x for m, x in zip(M, d, strict=True)]
        return [np.exp(g[at]) * w + m for w, m in zip(W, M, strict=True)], M, total

    return step
