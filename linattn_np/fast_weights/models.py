"""Inner models, from rows x to predictions z, with the gradient of their weights and its transpose.

    linear   z = x W
    mlp      z = gelu(x W1) W2
    swiglu   z = (silu(x A) * (x B)) W

Each is four functions. They multiply by the weights through `w` (products.py): of one mini-batch, or of each token its
own. The gradient of a matrix is l^T r, summed over rows: the rows l that it multiplies, and the cotangents r of its
products. That of its bias is the sum of r.

    forward(w, x)                      (z, residuals)
    factors(w, residuals, e)           ((l, r) of each matrix) for the cotangent e of z
    factors_vjp(w, residuals, e, d)    (de, dresiduals) from the cotangents (dl, dr)
    forward_vjp(w, residuals, dz, dr)  dx, dr: of the residuals; no dz: 0, where there is dr

The transposes add the gradients of the weights to w.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ..ops.activations import gelu_tanh, gelu_tanh_second, gelu_tanh_vjp
from ..ops.gates import sigmoid
from ..runtime.arrays import Array
from .types import Learner

Factors = tuple[tuple[Array, Array], ...]


class Body(NamedTuple):
    """The four functions of a model."""

    matrices: int
    forward: Callable[..., Any]
    factors: Callable[..., Factors]
    factors_vjp: Callable[..., Any]
    forward_vjp: Callable[..., Array]


# linear


def linear(w: Any, x: Array) -> Any:
    """z = x W."""
    return w.product(0, x), (x,)


def linear_factors(w: Any, residuals: Any, e: Array) -> Factors:
    """x^T e."""
    return ((residuals[0], e),)


def linear_factors_vjp(w: Any, residuals: Any, e: Array, d: Factors) -> Any:
    """The factors are x and e themselves."""
    ((dl, dr),) = d
    return dr, (dl,)


def linear_vjp(w: Any, residuals: Any, dz: Array | None, dresiduals: Any = None) -> Array:
    """dx = dz W^T."""
    w.add(0, residuals[0], dz)
    return _plus(w.transposed(0, dz), dresiduals, 0)


# mlp


def mlp(w: Any, x: Array) -> Any:
    """h = gelu(y), y = x W1; z = h W2."""
    y = w.product(0, x)
    h = gelu_tanh(w.xp, y)
    return w.product(1, h), (x, y, h)


def mlp_factors(w: Any, residuals: Any, e: Array) -> Factors:
    """x^T (e W2^T * gelu'(y)), h^T e."""
    x, y, h = residuals
    return (x, gelu_tanh_vjp(w.xp, y, w.transposed(1, e))), (h, e)


def mlp_factors_vjp(w: Any, residuals: Any, e: Array, d: Factors) -> Any:
    """r1 = u gelu'(y), u = e W2^T."""
    (dl1, dr1), (dl2, dr2) = d
    u, du = w.transposed(1, e), gelu_tanh_vjp(w.xp, residuals[1], dr1)
    w.add_product(1, du, e)
    return dr2 + w.without_bias(1, du), (dl1, dr1 * u * gelu_tanh_second(w.xp, residuals[1]), dl2)


def mlp_vjp(w: Any, residuals: Any, dz: Array | None, dresiduals: Any = None) -> Array:
    """dh = dz W2^T, dy = dh gelu'(y), dx = dy W1^T."""
    x, y, h = residuals
    w.add(1, h, dz)
    dy = _plus(gelu_tanh_vjp(w.xp, y, _plus(w.transposed(1, dz), dresiduals, 2)), dresiduals, 1)
    w.add(0, x, dy)
    return _plus(w.transposed(0, dy), dresiduals, 0)


# swiglu


def swiglu(w: Any, x: Array) -> Any:
    """h = silu(y) u, y = x A, u = x B; z = h W."""
    y, u = w.product(0, x), w.product(1, x)
    s = sigmoid(w.xp, y)
    return w.product(2, y * s * u), (x, y, u, s)


def swiglu_factors(w: Any, residuals: Any, e: Array) -> Factors:
    """x^T (dh u silu'), x^T (dh silu), h^T e, dh = e W^T."""
    x, y, u, s = residuals
    dh = w.transposed(2, e)
    return (x, dh * u * _silu_slope(y, s)), (x, dh * y * s), (y * s * u, e)


def swiglu_factors_vjp(w: Any, residuals: Any, e: Array, d: Factors) -> Any:
    """r1 = dh u silu'(y), r2 = dh silu(y), l3 = h."""
    _, y, u, s = residuals
    (dl1, dr1), (dl2, dr2), (dl3, dr3) = d
    dh, slope = w.transposed(2, e), _silu_slope(y, s)
    ddh = dr1 * u * slope + dr2 * y * s
    w.add_product(2, ddh, e)
    dy = dr1 * dh * u * _silu_second(y, s) + dr2 * dh * slope
    return dr3 + w.without_bias(2, ddh), (dl1 + dl2, dy, dr1 * dh * slope, dl3)


def swiglu_vjp(w: Any, residuals: Any, dz: Array | None, dresiduals: Any = None) -> Array:
    """dh = dz W^T; dy = dh u silu'(y), du = dh silu(y); dx = dy A^T + du B^T."""
    x, y, u, s = residuals
    if dz is not None:
        w.add(2, y * s * u, dz)
    dh = _plus(w.transposed(2, dz), dresiduals, 3)
    dy, du = _plus(dh * u * _silu_slope(y, s), dresiduals, 1), _plus(dh * y * s, dresiduals, 2)
    w.add(0, x, dy)
    w.add(1, x, du)
    return _plus(w.transposed(0, dy) + w.transposed(1, du), dresiduals, 0)


def _silu_slope(y: Array, s: Array) -> Array:
    """silu'(y), s = sigmoid(y)."""
    return s * (1 + y * (1 - s))


def _silu_second(y: Array, s: Array) -> Array:
    """silu''(y)."""
    return s * (1 - s) * (2 + y * (1 - 2 * s))


def _plus(x: Array | None, more: Any, n: int) -> Array:
    """x + more[n], if there are both."""
    return x if more is None else more[n] if x is None else x + more[n]


BODIES = {
    "linear": Body(1, linear, linear_factors, linear_factors_vjp, linear_vjp),
    "mlp": Body(2, mlp, mlp_factors, mlp_factors_vjp, mlp_vjp),
    "swiglu": Body(3, swiglu, swiglu_factors, swiglu_factors_vjp, swiglu_vjp),
}


def body_of(f: Learner) -> Body:
    """The functions of a learner whose model has a name."""
    return BODIES[str(f.model)]
