"""affine_projection: steps onto the last tokens together, as micro-steps of kda with orthonormal keys.

    W_t = W_{t-1} + mu_t X^T G^{-1} (D - X W_{t-1}),   G = X X^T + r I = L L^T,   X, D: the last `order` tokens

The rows of [X, sqrt(r) I] = L Q have products G, so that those of Q are orthonormal: a delta rule that takes them one
after the other, with the values L^{-1} D, takes them together. Q has `order` channels more than X. Their weights are 0
before each token: its first micro-step resets them.

With Y = L^{-1} R, R = [X, sqrt(r) I, D], the transpose is dR = L^{-T} dY, dL = -tril(dR Y^T), and that of G = L L^T is
dG = L^{-T} Phi(L^T dL) L^{-1}: Phi is the lower triangle with half of its diagonal; dX += (dG + dG^T) X.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from ..call.dispatch import run
from ..call.vjp import run_vjp
from ..runtime.arrays import Array, device, keep_lower
from ..spec import VariantSpec
from ..variants.delta.kda import SPEC as KDA
from .arguments import Filtered, ProjectionState, Pullback, Signals, later
from .windows import gathered, gathered_vjp

SPEC = replace(KDA, name="affine_projection")


class Factors(NamedTuple):
    """Of each token: X (..., T, P, K), L (..., T, P, P), Y = L^{-1} [X, sqrt(r) I, D] (..., T, P, K + P + V)."""

    X: Array
    L: Array
    Y: Array


def begin_of(s: Signals) -> ProjectionState:
    """The state before the first token."""
    if s.state is not None:
        return s.state
    xp, P, (*lead, _, K), V = s.xp, int(s.numbers["order"]), s.x.shape, s.d.shape[-1]
    shapes = (K, V), (P - 1, K), (P - 1, V)
    return ProjectionState(*(xp.zeros((*lead, *shape), dtype=s.dtype, device=device(s.x)) for shape in shapes))


def factors(s: Signals, begin: ProjectionState) -> Factors:
    """The factors of the last `order` tokens of each token."""
    xp, P = s.xp, int(s.numbers["order"])
    X, D = (gathered(xp, xp.concat([past, y], axis=-2), P) for past, y in ((begin.x, s.x), (begin.d, s.d)))
    G, info = xp.matmul(X, xp.matrix_transpose(X)), xp.finfo(s.dtype)
    least = P * float(info.eps) * xp.sum(xp.linalg.diagonal(G), axis=-1)
    r = xp.clip(least, max(s.numbers["eps"], float(info.smallest_normal) ** 0.5), None)[..., None, None]
    one = xp.eye(P, dtype=s.dtype, device=device(G))
    L = xp.linalg.cholesky(G + r * one)
    return Factors(X, L, xp.linalg.solve(L, xp.concat([X, xp.broadcast_to(xp.sqrt(r) * one, L.shape), D], axis=-1)))


def factors_vjp(s: Signals, own: Factors, dY: Array) -> tuple[Array, Array]:
    """Gradients of the rows (..., T + order - 1, .) of x and d."""
    xp, (X, L, Y), K = s.xp, own, s.x.shape[-1]
    P, T = L.shape[-1], xp.matrix_transpose
    dR = xp.linalg.solve(T(L), dY)
    S = xp.matmul(T(L), -keep_lower(xp, xp.matmul(dR, T(Y))))
    half = keep_lower(xp, S) - 0.5 * S * xp.eye(P, dtype=s.dtype, device=device(L))
    half = T(xp.linalg.solve(T(L), T(xp.linalg.solve(T(L), half))))
    dX = dR[..., :K] + xp.matmul(half + T(half), X)
    return gathered_vjp(xp, dX), gathered_vjp(xp, dR[..., K + P :])


def core_call(s: Signals) -> tuple[VariantSpec, dict[str, Any], tuple[ProjectionState, Factors]]:
    """kda, its arrays and options, and (the state before the first token, the factors)."""
    xp, (*lead, T, K), P, begin = s.xp, s.x.shape, int(s.numbers["order"]), begin_of(s)
    own, steps = factors(s, begin), (T + 1) * P

    def zeros(*shape: int) -> Array:
        return xp.zeros((*lead, *shape), dtype=s.dtype, device=device(s.x))

    def late(y: Array) -> Array:
        """(..., T, P, D), one token late, as (..., (T + 1) P, 1, D)."""
        return xp.reshape(later(xp, y, axis=-3), (*lead, steps, 1, y.shape[-1]))

    is_first = xp.arange(steps, device=device(s.x)) % P == 0
    reset = xp.where(is_first[:, None, None], zeros(steps, 1, P) - xp.inf, zeros(steps, 1, P))
    x = xp.repeat(later(xp, s.x, last=True), P, axis=-2)[..., None, :]
    call = {"q": xp.concat([x, zeros(steps, 1, P)], axis=-1), "k": late(own.Y[..., : K + P]),
            "v": late(own.Y[..., K + P :]), "g": xp.concat([zeros(steps, 1, K), reset], axis=-1),
            "beta": xp.repeat(later(xp, s.rate, axis=-1), P, axis=-1)[..., None],
            "state": xp.concat([begin.W, zeros(P, s.d.shape[-1])], axis=-2)[..., None, :, :],
            "scale": 1.0, "return_state": True, **s.options}  # fmt: skip
    return SPEC, call, (begin, own)


def projection_filter(s: Signals, gradients: bool) -> tuple[Filtered, Pullback | None]:
    """Filtered, and its pullback."""
    xp, (*lead, T, K), V, P = s.xp, s.x.shape, s.d.shape[-1], int(s.numbers["order"])
    spec, call, (begin, own) = core_call(s)
    (out, end), pull = run_vjp(spec, (), call) if gradients else (run(spec, (), call), None)
    y = xp.reshape(out, (*lead, T + 1, P, V))[..., :T, P - 1, :]
    W = xp.asarray(end[..., 0, :K, :], copy=True)
    past = (xp.concat([old, new], axis=-2)[..., T:, :] for old, new in ((begin.x, s.x), (begin.d, s.d)))
    found = Filtered(y, s.d - y, W, ProjectionState(W, *past))
    if pull is None:
        return found, None

    def pullback(d: Filtered) -> tuple[Array, Array, Array, ProjectionState]:
        dy = xp.zeros_like(s.d) if d.prediction is None else d.prediction
        dy = later(xp, dy if d.error is None else dy - d.error, last=True)[..., None, :]
        dout = xp.concat([xp.zeros((*lead, T + 1, P - 1, V), dtype=s.dtype, device=device(s.x)), dy], axis=-2)
        none = xp.zeros_like(W)
        dW = sum((z for z in (d.weights, None if d.state is None else d.state.W) if z is not None), none)
        dend = xp.concat([dW, xp.zeros((*lead, P, V), dtype=s.dtype, device=device(s.x))], axis=-2)
        grads = pull(xp.reshape(dout, out.shape), dend[..., None, :, :])
        each = (xp.reshape(z, (*lead, T + 1, P, z.shape[-1])) for z in (grads.q, grads.k, grads.v, grads.beta))
        dq, dk, dv, dbeta = each
        dX, dD = factors_vjp(s, own, xp.concat([dk, dv], axis=-1)[..., 1:, :, :])
        if d.state is not None:
            dX, dD = (z + _at_end(s, z, more) for z, more in ((dX, d.state.x), (dD, d.state.d)))
        dd = dD[..., P - 1 :, :] if d.error is None else dD[..., P - 1 :, :] + d.error
        dstate = ProjectionState(grads.state[..., 0, :K, :], dX[..., : P - 1, :], dD[..., : P - 1, :])
        dx = dX[..., P - 1 :, :] + xp.sum(dq, axis=-2)[..., :T, :K]
        return dx, dd, xp.sum(dbeta, axis=(-2, -1))[..., 1:], dstate

    return found, pullback


def _at_end(s: Signals, like: Array, y: Array) -> Array:
    """The last rows, zeros before them."""
    return s.xp.concat([s.xp.zeros_like(like[..., : like.shape[-2] - y.shape[-2], :]), y], axis=-2)
