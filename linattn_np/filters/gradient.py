"""lms and nlms: the delta rule with keys x, values d and the strengths mu.

nlms has keys x / n and values d / n, n = |x|, and strengths mu p with p = n^2 / (eps + n^2): no square of n is formed,
which may be too small or too large for a number.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..call.dispatch import run
from ..call.vjp import run_vjp
from ..ops.norms import over_length, over_length_vjp, unit, unit_vjp
from ..runtime.arrays import Array
from ..spec import VariantSpec
from ..variants.delta.delta_rule import SPEC
from .arguments import Filtered, Pullback, Signals, dout_of, later, pulled, result, tokens

SPECS = {name: replace(SPEC, name=name) for name in ("lms", "nlms")}


def shares(s: Signals) -> tuple[Array, Array]:
    """(p, 1 / n), each 0 where n is 0 or below the smallest normal number: nothing is learned there."""
    xp, one = s.xp, s.xp.ones_like(s.rate)
    over = over_length(xp, one[..., None], s.x)[..., 0]
    heard = xp.any(s.x != 0, axis=-1) & (over < 1 / float(xp.finfo(s.dtype).smallest_normal))
    over = xp.where(heard, over, xp.zeros_like(over))
    ratio = s.numbers["eps"] ** 0.5 * over
    return xp.where(heard, 1 / (1 + ratio * ratio), xp.zeros_like(over)), over


def core_call(s: Signals) -> tuple[VariantSpec, dict[str, Any], tuple[Array, Array]]:
    """The delta rule, its arrays and options, and the shares of nlms."""
    xp, own = s.xp, tokens(s)
    strength, share, over = s.rate, s.rate, s.rate
    if s.fn == "nlms":
        share, over = shares(s)
        strength = s.rate * share
        own |= {"k": later(xp, unit(xp, s.x))[..., None, :], "v": later(xp, s.d * over[..., None])[..., None, :]}
    state = None if s.state is None else s.state[..., None, :, :]
    call = {**own, "beta": later(xp, strength, axis=-1)[..., None], "state": state, "scale": 1.0,
            "return_state": True, **s.options}  # fmt: skip
    return SPECS[s.fn], call, (share, over)


def strengths(s: Signals) -> Array:
    """mu_t |x_t|^2 of lms, mu_t |x_t|^2 / (eps + |x_t|^2) of nlms, (..., T): the share of e_t corrected."""
    return s.rate * (s.xp.sum(s.x * s.x, axis=-1) if s.fn == "lms" else shares(s)[0])


def gradient_filter(s: Signals, gradients: bool) -> tuple[Filtered, Pullback | None]:
    """Filtered, and its pullback."""
    xp, (spec, call, (share, over)) = s.xp, core_call(s)
    if not gradients:
        out, W = run(spec, (), call)
        return result(s, out, W[..., 0, :, :], W[..., 0, :, :]), None
    (out, W), pull = run_vjp(spec, (), call)

    def pullback(d: Filtered) -> tuple[Array, Array, Array, Array]:
        dW = [y for y in (d.weights, d.state) if y is not None]
        grads = pull(dout_of(s, d), sum(dW[1:], dW[0])[..., None, :, :] if dW else None)
        db, dstate = grads.beta[..., 1:, 0], None if s.state is None else grads.state[..., 0, :, :]
        if s.fn == "lms":
            return *pulled(grads, d), db, dstate
        dq, dk, dv = grads.q[..., :-1, 0, :], grads.k[..., 1:, 0, :], grads.v[..., 1:, 0, :]
        # dx of x / n; of d / n; of p = 1 / (1 + eps / n^2): dp / dx = 2 p (1 - p) x / n^2
        dd, dx = over_length_vjp(xp, s.d[..., None, :], s.x[..., None, :], dv[..., None, :])
        dx = dq + unit_vjp(xp, s.x, dk) + xp.where((over > 0)[..., None], dx[..., 0, :], xp.zeros_like(dq))
        dx = dx + (2 * db * s.rate * share * (1 - share) * over)[..., None] * unit(xp, s.x)
        dd = xp.where((over > 0)[..., None], dd[..., 0, :], xp.zeros_like(dv))
        return dx, dd if d.error is None else dd + d.error, db * share, dstate

    return result(s, out, W[..., 0, :, :], W[..., 0, :, :]), pullback
