"""The inner gradient of a learner, the reading of a query, and their transposes, for the models that have a name.

    y = z, or x + LN(z);  z = body(x)          predict
    e = dl/dy(y, v), then dz, then factors     the gradient at (k, v)

The transpose of the gradient goes back through the same steps: factors, norm, loss, and the prediction of k. `w` are
the weights (products.py), which collect their gradients; slow: gamma and beta of the norm.
"""

from __future__ import annotations

from typing import Any

from ..runtime.arrays import Array, Namespace
from .fused import matmul
from .losses import loss_of
from .models import Factors, body_of
from .norm import norm, norm_vjp, norm_vjp_vjp
from .products import Shared
from .types import Functions, Learner, Tree


def predict(f: Learner, w: Any, slow: Tree, x: Array) -> tuple[Array, Any]:
    """(y, residuals)."""
    z, residuals = body_of(f).forward(w, x)
    return norm(w.xp, x, z, slow[0], slow[1], f.eps) if f.normed else z, (z, residuals)


def predict_vjp(f: Learner, w: Any, slow: Tree, residuals: Any, dy: Array | None, more: Any = (None, None)) -> Any:
    """(dx, dslow); more: further cotangents of z and of what the body keeps. dy None: 0, without a norm."""
    (z, residuals), (more_z, dresiduals), dz, dslow = residuals, more, dy, ()
    if f.normed:
        dz, dgamma = norm_vjp(w.xp, z, slow[0], dy, f.eps)
        dslow = tuple(w.xp.sum(d, axis=-2, keepdims=True) for d in (dgamma, dy))
    dz = more_z if dz is None else dz if more_z is None else dz + more_z
    dx = body_of(f).forward_vjp(w, residuals, dz, dresiduals)
    return dx + dy if f.normed else dx, dslow


def gradient(f: Learner, w: Any, slow: Tree, k: Array, v: Array) -> tuple[Factors, Any]:
    """(the factors of each matrix, residuals)."""
    if f.loss == "dot" and not f.normed:  # e = -v, whatever y is
        y = z = None
        residuals = body_of(f).forward(w, k, False)[1]
    else:
        y, (z, residuals) = predict(f, w, slow, k)
    e = loss_of(f.loss)[0](y, v)
    dz = norm_vjp(w.xp, z, slow[0], e, f.eps)[0] if f.normed else e
    return body_of(f).factors(w, residuals, dz), (y, z, residuals, e, dz)


def gradient_vjp(f: Learner, w: Any, slow: Tree, v: Array, residuals: Any, d: Factors) -> tuple[Array, Array, Tree]:
    """(dk, dv, dslow)."""
    y, z, residuals, e, dz = residuals
    de, dresiduals = body_of(f).factors_vjp(w, residuals, dz, d)
    more_z, dgamma = None, None
    if f.normed:
        more_z, dgamma, de = norm_vjp_vjp(w.xp, z, slow[0], e, de, f.eps)
    dy, dv = loss_of(f.loss)[1](y, v, de)
    dy = w.xp.zeros_like(y) if dy is None and f.normed else dy
    dk, dslow = predict_vjp(f, w, slow, (z, residuals), dy, (more_z, dresiduals))
    if f.normed:
        dslow = dslow[0] + w.xp.sum(dgamma, axis=-2, keepdims=True), dslow[1]
    return dk, dv, dslow


# the same as functions of whole arrays, for the definition


def functions_of(f: Learner, xp: Namespace, learning: int) -> Functions:
    """The model of a learner as functions; the first `learning` arrays learn."""
    if isinstance(f.model, Functions):
        return f.model
    body = body_of(f)

    def of(w: Tree) -> tuple[Shared, Tree]:
        return Shared(xp, w[:learning], body.matrices), w[learning:]

    def model(w: Tree, x: Array) -> Array:
        return predict(f, *of(w), x)[0]

    def model_vjp(w: Tree, x: Array, dy: Array) -> tuple[Tree, Array]:
        own, slow = of(w)
        dx, dslow = predict_vjp(f, own, slow, predict(f, own, slow, x)[1], dy)
        return (*own.d, *dslow), dx

    def model_vjp_vjp(w: Tree, x: Array, dy: Array, c: Tree) -> tuple[Tree, Array, Array]:
        own, slow = of(w)
        z, residuals = predict(f, own, slow, x)[1]
        dz = norm_vjp(xp, z, slow[0], dy, f.eps)[0] if f.normed else dy
        factors = body.factors(own, residuals, dz)
        d = tuple(_factors_vjp(xp, own.step, c, n, *lr) for n, lr in enumerate(factors))
        ddy, dresiduals = body.factors_vjp(own, residuals, dz, d)
        more_z, dslow = None, tuple[Any, ...]()
        if f.normed:
            more_z, dgamma, ddy = norm_vjp_vjp(xp, z, slow[0], dy, ddy, f.eps)
            dslow = xp.sum(dgamma, axis=-2, keepdims=True), xp.zeros_like(slow[1])
        dx = body.forward_vjp(own, residuals, more_z, dresiduals)
        return (*own.d, *dslow), dx, ddy

    return Functions(model, model_vjp, model_vjp_vjp)


def _factors_vjp(xp: Namespace, step: int, c: Tree, n: int, l: Array, r: Array) -> tuple[Array, Array]:
    """(dl, dr) of <c, l^T r>, and of the bias <c, sum r>."""
    dl, dr = matmul(xp, r, xp.matrix_transpose(c[step * n])), matmul(xp, l, c[step * n])
    return dl, dr + c[2 * n + 1] if step == 2 else dr
