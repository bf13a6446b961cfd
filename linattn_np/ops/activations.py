"""Activations of MLPs and their derivatives: gelu by its definition and by tanh, the square of relu.

    gelu(x) = x Phi(x),   Phi(x) = erfc(-x / sqrt 2) / 2        the distribution function of a normal variable
    tanh form: Phi(x) ~ (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2

erfc(z) = t e^{P(2 t - 1) - z^2} for z >= 0, t = 2 / (2 + z): P is the polynomial through log(erfc(z) / t) + z^2 at the
28 Chebyshev points. Its relative error is a few eps (1 + z^2).
"""

from __future__ import annotations

import math

from ..runtime.arrays import Array, Namespace
from .clip import clip

ERFC = (
    -0.6717940840566923, 0.6726432239776567, 0.04734330684190473, -0.046895610231182674, -0.009872689366406727,
    0.008824938557327763, 0.001758933558165434, -0.002345812504982584, -0.00014624686754045134, 0.0006736788382506061,
    -9.373500301998985e-05, -0.00017430319942974635, 7.140089189099235e-05, 3.174616564355679e-05,
    -3.0187528842243815e-05, 1.3509102932957954e-07, 8.56191490492248e-06, -2.9430926821341833e-06,
    -1.271343067023655e-06, 1.2437191416721655e-06, -1.6939237579995655e-07, -2.4404662375581676e-07,
    1.538760666928522e-07, -1.711069646695314e-09, -3.9356533447809914e-08, 1.2225710551260416e-08,
    4.089222480896167e-09, -2.0464670329192375e-09,
)  # fmt: skip
CUBE, ROOT = 0.044715, math.sqrt(2 / math.pi)
SATURATED = (-16.0, 16.0)  # outside, tanh u is -1 or 1, and cubes of large numbers overflow


def normal_cdf(xp: Namespace, x: Array) -> Array:
    """Phi(x)."""
    z = xp.abs(x) * math.sqrt(0.5)
    t = 2 / (2 + z)
    u = 2 * t - 1
    p = xp.zeros_like(x) + ERFC[-1]
    for c in ERFC[-2::-1]:
        p = p * u + c
    tail = 0.5 * t * xp.exp(p - z * z)
    return xp.where(x > 0, 1 - tail, tail)


def normal_density(xp: Namespace, x: Array) -> Array:
    """Phi'(x) = e^{-x^2 / 2} / sqrt(2 pi)."""
    return xp.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


def gelu(xp: Namespace, x: Array) -> Array:
    """x Phi(x)."""
    return x * normal_cdf(xp, x)


def gelu_vjp(xp: Namespace, x: Array, dy: Array) -> Array:
    return dy * (normal_cdf(xp, x) + x * normal_density(xp, x))


def gelu_tanh(xp: Namespace, x: Array) -> Array:
    """x (1 + tanh u) / 2, u = sqrt(2 / pi) (x + 0.044715 x^3)."""
    y = clip(xp, x, SATURATED)
    return 0.5 * x * (1 + xp.tanh(ROOT * (y + CUBE * y * y * y)))


def gelu_tanh_vjp(xp: Namespace, x: Array, dy: Array) -> Array:
    y = clip(xp, x, SATURATED)
    t = xp.tanh(ROOT * (y + CUBE * y * y * y))
    return dy * 0.5 * (1 + t + y * (1 - t * t) * ROOT * (1 + 3 * CUBE * y * y))


def gelu_tanh_second(xp: Namespace, x: Array) -> Array:
    """gelu'' of that form: with t = tanh u, (1 - t^2) (u' + x u'' / 2 - x t u'^2)."""
    y = clip(xp, x, SATURATED)
    t, first = xp.tanh(ROOT * (y + CUBE * y * y * y)), ROOT * (1 + 3 * CUBE * y * y)
    return (1 - t * t) * (first + y * (3 * ROOT * CUBE * y - t * first * first))


def squared_relu(xp: Namespace, x: Array) -> Array:
    """max(x, 0)^2."""
    y = xp.where(x < 0, xp.zeros_like(x), x)
    return y * y


def squared_relu_vjp(xp: Namespace, x: Array, dy: Array) -> Array:
    return 2 * xp.where(x < 0, xp.zeros_like(x), x) * dy
