"""Inner models, from rows x to predictions z, with the gradient of their weights and its transpose.

    linear   z = x W
    mlp      z = gelu(x W1) W2
    swiglu   z = (silu(x A) * (x B)) W

Each is four functions. They multiply by the weights through `w` (products.py): of one mini-batch, or of each token its
own. The gradient of a matrix is l^T r, summed over rows: the rows l that it multiplies, and the cotangents r of its
products. That of its bias is the sum of r.

    forward(w, x, predicts)            (z, residuals); z None if it is not wanted
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
from .fused import fused_of
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


def linear(w: Any, x: Array, predicts: bool = True) -> Any:
    """z = x W."""
    return w.product(0, x) if predicts else None, (x,)


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


def mlp(w: Any, x: Array, predicts: bool = True) -> Any:
    """h = gelu(y), y = x W1; z = h W2."""
    y = w.product(0, x)
    h = gelu_tanh(w.xp, y) if (fused := fused_of(w.xp, y)) is None else fused.numbers("gelu", 1, y)[0]
    return w.product(1, h) if predicts else None, (x, y, h)


def mlp_factors(w: Any, residuals: Any, e: Array) -> Factors:
    """x^T (e W2^T * gelu'(y)), h^T e."""
    x, y, h = residuals
    return (x, _gelu_vjp(w.xp, y, w.transposed(1, e))), (h, e)


def mlp_factors_vjp(w: Any, residuals: Any, e: Array, d: Factors) -> Any:
    """r1 = u gelu'(y), u = e W2^T."""
    (dl1, dr1), (dl2, dr2) = d
    u, y = w.transposed(1, e), residuals[1]
    if (fused := fused_of(w.xp, y, dr1, u)) is not None:
        du, dy = fused.numbers("gelu_vjps", 2, y, dr1, u)
    else:
        du, dy = gelu_tanh_vjp(w.xp, y, dr1), dr1 * u * gelu_tanh_second(w.xp, y)
    w.add_product(1, du, e)
    return dr2 + w.without_bias(1, du), (dl1, dy, dl2)


def mlp_vjp(w: Any, residuals: Any, dz: Array | None, dresiduals: Any = None) -> Array:
    """dh = dz W2^T, dy = dh gelu'(y), dx = dy W1^T."""
    x, y, h = residuals
    w.add(1, h, dz)
    dy = _gelu_vjp(w.xp, y, w.transposed(1, dz), *((None, None) if dresiduals is None else dresiduals[1:]))
    w.add(0, x, dy)
    return _plus(w.transposed(0, dy), dresiduals, 0)


def _gelu_vjp(xp: Any, y: Array, dh: Array | None, dy: Array | None = None, more: Array | None = None) -> Array:
    """(dh + more) gelu'(y) + dy; None is 0."""
    if dh is None:
        dh, more = more, None
    if (fused := fused_of(xp, y, dh, dy, more)) is not None:
        return fused.numbers("gelu_vjp", 1, y, dh, dy, more)[0]
    d = gelu_tanh_vjp(xp, y, dh if more is None else dh + more)
    return d if dy is None else d + dy


# swiglu


def swiglu(w: Any, x: Array, predicts: bool = True) -> Any:
    """h = silu(y) u, y = x A, u = x B; z = h W."""
    y, u = w.product(0, x), w.product(1, x)
    if (fused := fused_of(w.xp, y, u)) is not None:
        return None if not predicts else w.product(2, fused.numbers("swiglu", 1, y, u)[0]), (x, y, u, None)
    s = sigmoid(w.xp, y)
    return w.product(2, y * s * u) if predicts else None, (x, y, u, s)


def swiglu_factors(w: Any, residuals: Any, e: Array) -> Factors:
    """x^T (dh u silu'), x^T (dh silu), h^T e, dh = e W^T."""
    x, y, u, s = residuals
    dh = w.transposed(2, e)
    if s is None:
        r1, r2, h = fused_of(w.xp, y).numbers("factors", 3, y, u, dh)
        return (x, r1), (x, r2), (h, e)
    return (x, dh * u * _silu_slope(y, s)), (x, dh * y * s), (y * s * u, e)


def swiglu_factors_vjp(w: Any, residuals: Any, e: Array, d: Factors) -> Any:
    """r1 = dh u silu'(y), r2 = dh silu(y), l3 = h."""
    _, y, u, s = residuals
    (dl1, dr1), (dl2, dr2), (dl3, dr3) = d
    dh = w.transposed(2, e)
    if s is None:
        ddh, dy, du = fused_of(w.xp, y).numbers("factors_vjp", 3, y, u, dh, dr1, dr2)
    else:
        slope = _silu_slope(y, s)
        ddh, du = dr1 * u * slope + dr2 * y * s, dr1 * dh * slope
        dy = dr1 * dh * u * _silu_second(y, s) + dr2 * dh * slope
    w.add_product(2, ddh, e)
    return dr3 + w.without_bias(2, ddh), (dl1 + dl2, dy, du, dl3)


def swiglu_vjp(w: Any, residuals: Any, dz: Array | None, dresiduals: Any = None) -> Array:
    """dh = dz W^T; dy = dh u silu'(y), du = dh silu(y); dx = dy A^T + du B^T."""
    x, y, u, s = residuals
    if dz is not None:
        w.add(2, y * s * u if s is not None else fused_of(w.xp, y).numbers("swiglu", 1, y, u)[0], dz)
    dh = _plus(w.transposed(2, dz), dresiduals, 3)
    if s is None:
        more = (None, None) if dresiduals is None else dresiduals[1:3]
        dy, du = fused_of(w.xp, y).numbers("swiglu_vjp", 2, y, u, dh, *more)
    else:
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
