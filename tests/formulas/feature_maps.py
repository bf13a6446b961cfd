"""Feature maps given from outside the library, each a pair f(x) and f_vjp(x, dphi)."""

from math import comb, factorial

import numpy as np


def elu_plus_one(x):
    return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))


def relu_plus(x):
    return np.maximum(x, 0) + 0.01


ELU_PLUS_ONE = (elu_plus_one, lambda x, dphi: dphi * np.exp(np.minimum(x, 0)))
RELU_PLUS = (relu_plus, lambda x, dphi: dphi * (x > 0))


def monomials(n, weights):
    """Features sqrt(weight) x_1^a x_2^b for a + b <= n of a vector of two; weights(a, b)."""
    a, b = np.array([(a, b) for a in range(n + 1) for b in range(n + 1 - a)]).T
    root = np.sqrt([weights(int(i), int(j)) for i, j in zip(a, b, strict=True)])

    def features(x):
        return root * x[..., :1] ** a * x[..., 1:] ** b

    def features_vjp(x, dphi):
        d1 = root * a * x[..., :1] ** np.maximum(a - 1, 0) * x[..., 1:] ** b
        d2 = root * b * x[..., :1] ** a * x[..., 1:] ** np.maximum(b - 1, 0)
        return np.stack([(dphi * d1).sum(-1), (dphi * d2).sum(-1)], axis=-1)

    return features, features_vjp


def taylor(n):
    """phi(q) . phi(k) = sum_{p <= n} (q . k)^p / p!."""
    return monomials(n, lambda a, b: 1 / (factorial(a) * factorial(b)))


def compound(n):
    """phi(q) . phi(k) = (1 + q . k / n)^n."""
    return monomials(n, lambda a, b: comb(n, a) * comb(n - a, b) / n ** (a + b))


def gauss_hermite(nodes):
    """Of one channel: e^(w x - x^2 / 2) sqrt(weight of w), so that phi(q) . phi(k) = e^(q k)."""
    w, weight = np.polynomial.hermite_e.hermegauss(nodes)
    root = np.sqrt(weight / weight.sum())

    def features(x):
        return root * np.exp(w * x - x**2 / 2)

    def features_vjp(x, dphi):
        return (dphi * features(x) * (w - x)).sum(-1, keepdims=True)

    return features, features_vjp
