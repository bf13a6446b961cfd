"""rls: mesa_net's memory of keys x and values d, whose ridge is delta lambda^t, and not below rounding.

    Z_t + max(r_t, K eps trace(Z_t)) I,        r_t = lambda_t r_{t-1}

trace(Z_t) is a memory too, of one number: simple_gla with the values |x_t|^2.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..call.dispatch import run
from ..call.vjp import run_vjp
from ..matrix_state.types import SolvedState
from ..runtime.arrays import Array, Namespace, device
from ..spec import VariantSpec
from ..variants.no_erase.mesa_net import SPEC as MESA_NET
from ..variants.no_erase.simple_gla import simple_gla
from .arguments import Filtered, Pullback, RLSState, Signals, dout_of, later, pulled, result, tokens

SPEC = replace(MESA_NET, name="rls")


def begin_of(s: Signals) -> RLSState:
    """The state before the first token."""
    if s.state is not None:
        return s.state
    xp, (*lead, _, K), V = s.xp, s.x.shape, s.d.shape[-1]
    S, Z = (xp.zeros((*lead, K, n), dtype=s.dtype, device=device(s.x)) for n in (V, K))
    return RLSState(S, Z, xp.full(tuple(lead), s.numbers["delta"], dtype=s.dtype, device=device(s.x)))


def rounding(s: Signals, g: Array, Z: Array) -> Array:
    """K eps trace(Z_t) before and after every token, (..., T + 1)."""
    xp, K = s.xp, s.x.shape[-1]
    values = later(xp, xp.sum(s.x * s.x, axis=-1), axis=-1)[..., None, None]
    trace = xp.sum(xp.linalg.diagonal(Z), axis=-1)[..., None, None, None]
    one = xp.ones_like(values)
    sums = simple_gla(one, one, values, g, scale=1.0, state=trace)[..., 0, 0]
    info = xp.finfo(s.dtype)
    return xp.clip(K * float(info.eps) * sums, float(info.smallest_normal) ** 0.5, None)


def core_call(s: Signals) -> tuple[VariantSpec, dict[str, Any], tuple[RLSState, Array, Array]]:
    """mesa_net's memory, its arrays and options, and (state before the first token, r_t, least ridge)."""
    xp, begin, K = s.xp, begin_of(s), s.x.shape[-1]
    g = later(xp, xp.log(s.rate), axis=-1)[..., None]
    vanishing = begin.ridge[..., None] * xp.exp(xp.cumulative_sum(g[..., 0], axis=-1))  # r_0 .. r_T
    least = rounding(s, g, begin.Z)
    ridge = xp.where(vanishing > least, vanishing, least)
    one = later(xp, xp.ones_like(s.rate), axis=-1)[..., None]
    rows = xp.broadcast_to(ridge[..., None, None], (*ridge.shape, 1, K))
    state = SolvedState(*(y[..., None, :, :] for y in (begin.S, begin.Z)))
    call = {**tokens(s), "g": g, "beta": one, "ridge": rows, "state": state, "scale": 1.0, "return_state": True,
            **s.options}  # fmt: skip
    return SPEC, call, (begin, vanishing, least)


def least_squares(s: Signals, gradients: bool) -> tuple[Filtered, Pullback | None]:
    """Filtered, and its pullback."""
    xp, K, (spec, call, (begin, vanishing, least)) = s.xp, s.x.shape[-1], core_call(s)
    (out, end), pull = run_vjp(spec, (), call) if gradients else (run(spec, (), call), None)
    S, Z = (y[..., 0, :, :] for y in end)
    A = Z + call["ridge"][..., -1, 0, :1, None] * xp.eye(K, dtype=s.dtype, device=device(s.x))
    W = xp.linalg.solve(A, S)
    found = result(s, out, W, RLSState(S, Z, vanishing[..., -1]))
    if pull is None:
        return found, None

    def pullback(d: Filtered) -> tuple[Array, Array, Array, RLSState]:
        dS, dZ, dend = _weights_vjp(xp, A, W, d)
        grads = pull(dout_of(s, d), SolvedState(dS[..., None, :, :], dZ[..., None, :, :]))
        dridge = xp.sum(grads.ridge, axis=(-2, -1))
        dridge = xp.concat([dridge[..., :-1], dridge[..., -1:] + dend[..., None]], axis=-1)
        dr = xp.where(vanishing > least, dridge, xp.zeros_like(dridge))
        if d.state is not None:
            dr = xp.concat([dr[..., :-1], dr[..., -1:] + d.state.ridge[..., None]], axis=-1)
        dlog = xp.flip(xp.cumulative_sum(xp.flip(dr * vanishing, axis=-1), axis=-1), axis=-1)  # of log r_0 and each g
        dg = grads.g[..., 0] + dlog
        dS0, dZ0 = (y[..., 0, :, :] for y in grads.state)
        dstate = RLSState(dS0, dZ0, dlog[..., 0] / begin.ridge)
        return *pulled(grads, d), dg[..., 1:] / s.rate, dstate

    return found, pullback


def _weights_vjp(xp: Namespace, A: Array, W: Array, d: Filtered) -> tuple[Any, Any, Array]:
    """(dS, dZ, d ridge_T) of A W = S, A = Z + ridge_T I:   dS = A^-T dW, dA = -dS W^T."""
    dS, dZ, dend = xp.zeros_like(W), xp.zeros_like(A), xp.zeros(A.shape[:-2], dtype=A.dtype, device=device(A))
    if d.weights is not None:
        dS = xp.linalg.solve(xp.matrix_transpose(A), d.weights)
        dZ = -dS @ xp.matrix_transpose(W)
        dend = xp.sum(xp.linalg.diagonal(dZ), axis=-1)
    if d.state is not None:
        dS, dZ = dS + d.state.S, dZ + d.state.Z
    return dS, dZ, dend
