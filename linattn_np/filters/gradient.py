"""lms and nlms: the delta rule with keys x, values d and the strengths mu, or mu / (eps + |x|^2)."""

from __future__ import annotations

from dataclasses import replace

from ..call.dispatch import run
from ..call.vjp import run_vjp
from ..runtime.arrays import Array
from ..variants.delta.delta_rule import SPEC
from .arguments import Filtered, Pullback, Signals, dout_of, later, pulled, result, tokens

SPECS = {name: replace(SPEC, name=name) for name in ("lms", "nlms")}


def over_power(s: Signals) -> Array:
    """1 / (eps + |x_t|^2), 0 where that is no number; 1 for lms."""
    if s.fn == "lms":
        return s.xp.ones_like(s.rate)
    power = s.numbers["eps"] + s.xp.sum(s.x * s.x, axis=-1)
    none = power == 0
    return s.xp.where(none, s.xp.zeros_like(power), 1 / s.xp.where(none, s.xp.ones_like(power), power))


def gradient_filter(s: Signals, gradients: bool) -> tuple[Filtered, Pullback | None]:
    """Filtered, and its pullback."""
    xp, over = s.xp, over_power(s)
    beta = later(xp, s.rate * over, axis=-1)[..., None]
    state = None if s.state is None else s.state[..., None, :, :]
    call = {**tokens(s), "beta": beta, "state": state, "scale": 1.0, "return_state": True, **s.options}
    if not gradients:
        out, W = run(SPECS[s.fn], (), call)
        return result(s, out, W[..., 0, :, :], W[..., 0, :, :]), None
    (out, W), pull = run_vjp(SPECS[s.fn], (), call)

    def pullback(d: Filtered) -> tuple[Array, Array, Array, Array]:
        dW = [y for y in (d.weights, d.state) if y is not None]
        grads = pull(dout_of(s, d), sum(dW[1:], dW[0])[..., None, :, :] if dW else None)
        (dx, dd), db = pulled(grads, d), grads.beta[..., 1:, 0]
        if s.fn == "nlms":  # b = mu / p, p = eps + |x|^2: db / dx = -2 mu x / p^2
            dx = dx - (2 * db * s.rate * over**2)[..., None] * s.x
        return dx, dd, db * over, None if s.state is None else grads.state[..., 0, :, :]

    return result(s, out, W[..., 0, :, :], W[..., 0, :, :]), pullback
