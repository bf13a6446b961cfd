"""NORMALISED read-out with the sum of weights apart: outputs divided by it, states (S, z).

    S_t = e^{g_t} S_{t-1} + k_t^T w_t v_t        z_t = e^{g_t} z_{t-1} + w_t k_t        s_t = scale q_t z_t^T
    out_t = scale q_t S_t / (s_t + eps),  or  scale q_t S_t / max(|s_t|, least_t)

One token on CuPy arrays is one kernel. Other calls, and gradients, have z as one more column of S: values w [v, 1].
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from ...core import Computed, Explained, register
from ...ops.averages import divide, divide_by_most, divided_vjp, most, quotient, with_ones, with_sums
from ...runtime.arrays import Array, cast, is_cupy
from .. import core
from ..types import Inputs, Plan


class AveragedInputs(NamedTuple):
    """Arrays (..., T, heads, width), or their gradients."""

    q: Array  # (..., T, Hq, K)  None: write without reading
    k: Array  # (..., T, Hk, K)
    v: Array  # (..., T, H, V)
    g: Array = None  # (..., T, H, 1)
    w: Array = None  # (..., T, H)  weights of the tokens; None: 1
    least: Array = None  # (..., T, H)  sums count as at least so large; None: eps is added
    eps: float = 0.0

    @property
    def core(self) -> Inputs:
        """The core's inputs without weights."""
        return Inputs(self.q, self.k, self.v, self.g)

    def columns(self, plan: Plan) -> Inputs:
        """The core's inputs with a column for the sum of weights."""
        w = None if self.w is None else self.w[..., None]
        return self.core._replace(v=with_ones(plan.xp, self.v, plan.dtype, w))


class Residuals(NamedTuple):
    """What a backward needs."""

    fn: str
    wanted: str | None
    x: AveragedInputs
    plan: Plan
    state: Any


def forward(fn: str, x: AveragedInputs, plan: Plan, state: Any, wanted: str | None) -> Computed:
    """(out, (S, z) after the last token, residuals)."""
    saved = Residuals(fn, wanted, x, plan, state)
    if is_cupy(plan.xp) and wanted in (None, "cuda"):
        from ..cuda.token import averages as kernel

        if kernel.takes(x.core, plan, state):
            w, least = (None if y is None else y[..., None] for y in (x.w, x.least))
            return *kernel.forward(x.core, plan, state, w, least, x.eps), saved
    out, end, _ = _by_columns(saved, plan._replace(overwrite=False))
    if out is not None:
        out = divide(plan.xp, out, x.eps)[0] if x.least is None else divide_by_most(plan.xp, out, x.least)
    return out, (end[..., :-1], end[..., -1]), saved


def _by_columns(saved: Residuals, plan: Plan) -> Computed:
    """The core's forward, sums of weights being the last column of values and states."""
    state = None if saved.state is None else _with_sums(plan, saved.state)
    return core.forward(saved.fn, saved.x.columns(plan), plan, state, saved.wanted)


def _with_sums(plan: Plan, state: tuple[Array, Array]) -> Array:
    """[S, z]"""
    S, z = state
    return with_sums(plan.xp, S, z, plan.dtype, view=False)


def backward(residuals: Residuals, dout: Array | None, dstate: Any) -> tuple[AveragedInputs, Any]:
    """Gradients of every input, and of the initial (S, z)."""
    x, plan = residuals.x, residuals.plan
    xp, (out, _, rest) = plan.xp, _by_columns(residuals, plan)
    if dout is not None:
        dout = _divided_vjp(xp, x, out, cast(xp, dout, plan.dtype))
    d, dboth = core.backward(rest, dout, None if dstate is None else _with_sums(plan, dstate))
    dv, dw = d.v[..., :-1], None
    if x.w is not None:
        dw = xp.sum(dv * cast(xp, x.v, plan.dtype), axis=-1) + d.v[..., -1]  # <d.v, [v, 1]>
        dv = x.w[..., None] * dv
    return AveragedInputs(d.q, d.k, dv, d.g, dw), (dboth[..., :-1], dboth[..., -1])


def _divided_vjp(xp: Any, x: AveragedInputs, out: Array, dout: Array) -> Array:
    """The gradient of numerators and denominator; where `least` is the larger, the denominator has none."""
    if x.least is None:
        return divided_vjp(xp, out, x.eps, dout, dout.dtype)
    num, den = out[..., :-1], out[..., -1:]
    denominator, is_den = most(xp, den, x.least)
    dnum = quotient(xp, dout, denominator)
    dden = quotient(xp, -xp.sign(den) * xp.sum(dnum * num, axis=-1, keepdims=True), denominator)
    return xp.concat([dnum, xp.where(is_den, dden, xp.zeros_like(dden))], axis=-1)


def explain(fn: str, x: AveragedInputs, plan: Plan, wanted: str | None) -> Explained:
    """Backend, form and operations of a call."""
    return core.explain(fn, x.core, plan, wanted)


def gives_states(fn: str, x: AveragedInputs, plan: Plan, wanted: str | None) -> bool:
    """Whether forward takes plan.states_at."""
    return False


def reads_out(residuals: Residuals) -> bool:
    """Whether backward reads the output."""
    return False


def reads_end(residuals: Residuals) -> bool:
    """Whether backward reads the final state."""
    return False


register(sys.modules[__name__], AveragedInputs)
