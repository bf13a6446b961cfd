"""Norms, activations, convolutions and losses by their definitions, element by element in Python's float64."""

from __future__ import annotations

import itertools
import math

import numpy as np

INF = math.inf


def each(f):
    """A function of numbers on arrays of one shape."""

    def mapped(*arrays, **named):
        arrays = (*arrays, *named.values())
        out = np.empty(arrays[0].shape)
        for n in np.ndindex(out.shape):
            out[n] = f(*(float(x[n]) for x in arrays))
        return out

    return mapped


def logistic(x):
    return 1 / (1 + math.exp(-x)) if x > 0 else math.exp(x) / (1 + math.exp(x))


def log1p_exp(x):
    return max(x, 0) + math.log1p(math.exp(-abs(x)))


sigmoid = each(logistic)
silu = each(lambda x: x * logistic(x))
softplus = each(log1p_exp)
log_sigmoid = each(lambda x: -log1p_exp(-x))
squared_relu = each(lambda x: max(x, 0) ** 2)
swiglu = each(lambda x, gate: x * gate * logistic(gate))


def gelu(x, approximate="none"):
    if approximate == "tanh":
        return each(lambda y: y * (1 + math.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3))) / 2)(x)
    return each(lambda y: y * math.erfc(-y / math.sqrt(2)) / 2)(x)


def rows(f, x, *more):
    """f of each row, and of the same row of others."""
    out = np.empty(x.shape)
    for n in np.ndindex(x.shape[:-1]):
        out[n] = f(x[n], *(y[n] for y in more))
    return out


def l2_norm(x, eps=1e-6):
    return rows(lambda r: r / math.sqrt(sum(y * y for y in r) + eps), x)


def normed(r, eps, centred):
    r = [y - sum(r) / len(r) for y in r] if centred else r
    return np.array([y / math.sqrt(sum(z * z for z in r) / len(r) + eps) for y in r])


def rms_norm(x, weight=1.0, bias=0.0, eps=1e-6):
    return rows(lambda r: normed(r, eps, False), x) * weight + bias


def layer_norm(x, weight=1.0, bias=0.0, eps=1e-5):
    return rows(lambda r: normed(r, eps, True), x) * weight + bias


def group_norm(x, weight=1.0, bias=0.0, groups=1, eps=1e-5, centred=True):
    parts = np.reshape(x, (*x.shape[:-1], groups, -1))
    return rows(lambda r: normed(r, eps, centred), parts).reshape(x.shape) * weight + bias


def gated_norm(x, gate, weight=1.0, eps=1e-6, activation="silu", gate_first=False, group=None):
    act = sigmoid(gate) if activation == "sigmoid" else silu(gate)
    groups = x.shape[-1] // (group or x.shape[-1])
    if gate_first:
        return group_norm(x * act, weight, 0.0, groups, eps, False)
    return group_norm(x, weight, 0.0, groups, eps, False) * act


def softmax(x):
    return rows(lambda r: np.array([math.exp(y - max(r)) for y in r]) / sum(math.exp(y - max(r)) for y in r), x)


def sequences(x, state, cu_seqlens):
    """(first, stop, inputs before) of every sequence, with the index of its batch row."""
    flat = x.reshape(-1, *x.shape[-2:])
    S = 0 if state is None else state.shape[-2]
    past = np.zeros((99, 0, x.shape[-1])) if state is None else state.reshape(-1, S, x.shape[-1])
    if cu_seqlens is None:
        return [(n, 0, x.shape[-2], past[n]) for n in range(len(flat))]
    return [(0, a, b, past[n]) for n, (a, b) in enumerate(itertools.pairwise(cu_seqlens))]


def with_past(x, state, cu_seqlens, least):
    """[inputs before, tokens] of every sequence, with at least so many inputs before."""
    flat = x.reshape(-1, *x.shape[-2:])
    for row, first, stop, past in sequences(x, state, cu_seqlens):
        missing = np.zeros((max(least - len(past), 0), x.shape[-1]))
        yield row, first, np.concatenate([missing, past, flat[row, first:stop]]), max(len(past), least)


def short_conv(x, weight, bias=0.0, state=None, activation=None, residual=False, cu_seqlens=None, **_):
    """(y, the last inputs of each sequence)."""
    W, out, ends = weight.shape[1], np.zeros((math.prod(x.shape[:-2]), *x.shape[-2:])), []
    for row, first, both, S in with_past(x, state, cu_seqlens, W - 1):
        for t in range(len(both) - S):
            z = sum(weight[:, W - 1 - i] * both[S + t - i] for i in range(W)) + bias
            out[row, first + t] = (silu(z) if activation else z) + residual * both[S + t]
        ends.append(both[len(both) - S :])
    lead = x.shape[:-2] if cu_seqlens is None else (len(cu_seqlens) - 1,)
    return out.reshape(x.shape), np.stack(ends).reshape(*lead, *ends[0].shape)


def token_shift(x, mix=1.0, state=None, cu_seqlens=None, **_):
    out, ends = np.zeros((math.prod(x.shape[:-2]), *x.shape[-2:])), []
    for row, first, both, S in with_past(x, state, cu_seqlens, 1):
        for t in range(len(both) - S):
            out[row, first + t] = both[S + t] + mix * (both[S + t - 1] - both[S + t])
        ends.append(both[len(both) - S :])
    lead = x.shape[:-2] if cu_seqlens is None else (len(cu_seqlens) - 1,)
    return out.reshape(x.shape), np.stack(ends).reshape(*lead, *ends[0].shape)


def rotary(x, angle=None, base=10000.0, dims=None, interleaved=False, offset=0, cumulative=False, cu_seqlens=None,
           size=lambda p, P, n: 1.0):  # fmt: skip
    T, H, K = x.shape[-3:]
    out, P = x.copy(), (dims or K) // 2 if angle is None else angle.shape[-1]
    starts = [0] if cu_seqlens is None else cu_seqlens
    for n in np.ndindex(x.shape[:-3]):
        total = {}
        for t in range(T):
            first = max(s for s in starts if s <= t)
            for h in range(H):
                for p in range(P):
                    if angle is None:
                        theta = (offset + t - first) * base ** (-p / P)
                    else:
                        theta = angle[(*n, t, p) if angle.ndim < x.ndim else (*n, t, h, p)]
                        total[h, p] = theta + (total[h, p] if t > first else 0)
                        theta = total[h, p] if cumulative else theta
                    i, j = (2 * p, 2 * p + 1) if interleaved else (p, P + p)
                    a, b = x[(*n, t, h)][[i, j]] * size(p, P, offset + t - first)
                    out[(*n, t, h)][[i, j]] = (a * math.cos(theta) - b * math.sin(theta),
                                               b * math.cos(theta) + a * math.sin(theta))  # fmt: skip
    return out


def xpos(x, inverse=False, scale_base=512.0, gamma=0.4, **options):
    def size(p, P, n):
        return ((p / P + gamma) / (1 + gamma)) ** ((-1 if inverse else 1) * n / scale_base)

    return rotary(x, size=size, **options)


def log_decay(a, A_log=0.0, bias=0.0, formula="softplus", bound=-5.0, divisor=1.0):
    b, rate = a + bias, np.broadcast_to(np.exp(A_log), a.shape)
    if formula == "softplus":
        return -rate * softplus(b)
    if formula == "bounded":
        return bound * sigmoid(rate * b)
    if formula == "exp":
        return -rate * np.exp(b)
    return log_sigmoid(b) / divisor if formula == "log_sigmoid" else np.log(bound + (1 - bound) * sigmoid(b))


def linear(x, weight, bias=0.0):
    out = np.zeros((*x.shape[:-1], weight.shape[1]))
    for n in np.ndindex(out.shape):
        out[n] = sum(x[(*n[:-1], k)] * weight[k, n[-1]] for k in range(len(weight)))
    return out + bias


def embedding(ids, weight):
    return np.stack([weight[n] for n in ids.reshape(-1)]).reshape(*ids.shape, -1)


def cross_entropy(x, labels, weight=None, bias=0.0, ignore_index=-100, label_smoothing=0.0, z_loss=0.0,
                  reduction="mean"):  # fmt: skip
    logits = x if weight is None else x @ weight + bias
    found, count = np.zeros(labels.shape), 0
    for n in np.ndindex(labels.shape):
        if labels[n] == ignore_index:
            continue
        row = [float(v) for v in logits[n]]
        lse = max(row) + math.log(sum(math.exp(v - max(row)) for v in row))
        own = lse - (1 - label_smoothing) * row[labels[n]] - label_smoothing * sum(row) / len(row)
        found[n], count = own + z_loss * lse**2, count + 1
    return found if reduction == "none" else np.sum(found) / (max(count, 1) if reduction == "mean" else 1)


def dropout(x, rng, p=0.1):
    draws = np.random.default_rng(rng).random(x.shape, np.float32)
    return np.where(draws >= p, x / (1 - p), 0)
