"""Feature maps written out: monomials, random features, norms, DPFP, softmax pairs."""

from itertools import combinations_with_replacement
from math import ceil, factorial

import numpy as np


def monomials(x, p):
    """sqrt(p! / prod n_i!) x_{i1} ... x_{ip} for i1 <= ... <= ip."""
    found = []
    for m in combinations_with_replacement(range(x.shape[-1]), p):
        often = factorial(p)
        for i in set(m):
            often //= factorial(m.count(i))
        product = np.full(x.shape[:-1], often**0.5)
        for i in m:
            product = product * x[..., i]
        found.append(product)
    return np.stack(found, axis=-1)


def taylor(x, order=2):
    """phi(q) . phi(k) = sum_p z^p / p!, z = q . k / sqrt(K)."""
    y = x * x.shape[-1] ** -0.25
    return np.concatenate([monomials(y, p) * factorial(p) ** -0.5 for p in range(order + 1)], axis=-1)


def layer_norm(x, eps=1e-5):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps)


def square(x):
    """phi(q) . phi(k) = (q . k)^2 / K."""
    return monomials(x * x.shape[-1] ** -0.25, 2)


def directions(K, m, seed):
    """m rows in orthogonal blocks of K, each as long as a normal vector; float32 numbers."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(ceil(m / K)):
        Q, R = np.linalg.qr(rng.standard_normal((K, K)))
        rows += [Q[:, j] * (-1 if R[j, j] < 0 else 1) for j in range(K)]
    lengths = np.sqrt((rng.standard_normal((m, K)) ** 2).sum(1))
    return np.array([length * row for length, row in zip(lengths, rows, strict=False)]).astype(np.float32)


def favor(x, num_features=None, seed=0, hyperbolic=False):
    """e^{w . y - |y|^2 / 2} / sqrt(M), y = x K^{-1/4}."""
    K = x.shape[-1]
    m = max(2, round(K * np.log(K))) if num_features is None else num_features
    if hyperbolic:
        m += m % 2
        w = directions(K, m // 2, seed)
        w = np.concatenate([w, -w])
    else:
        w = directions(K, m, seed)
    y = x * K**-0.25
    return np.exp(y @ w.T.astype(float) - (y**2).sum(-1, keepdims=True) / 2) / np.sqrt(m)


def fourier(x, num_features=64, seed=0, sigma=1.0):
    """[sin, cos](w . y / sigma) / sqrt(m), y = x / |x|."""
    y = x / np.linalg.norm(x, axis=-1, keepdims=True)
    angle = y @ directions(x.shape[-1], num_features, seed).T.astype(float) / sigma
    return np.concatenate([np.sin(angle), np.cos(angle)], axis=-1) / np.sqrt(num_features)


def dpfp(x, nu=1):
    """r_i r_{i - j}, r = [relu(x), relu(-x)]."""
    r = np.concatenate([np.maximum(x, 0), np.maximum(-x, 0)], axis=-1)
    n = r.shape[-1]
    return np.stack([r[..., i] * r[..., (i - j) % n] for j in range(1, nu + 1) for i in range(n)], axis=-1)


def softmax_pair(x):
    parts = [np.exp(x), np.exp(-x)]
    return np.concatenate([p / p.sum(-1, keepdims=True) for p in parts], axis=-1)
