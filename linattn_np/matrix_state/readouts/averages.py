"""NORMALISED read-out with the sum of weights apart: outputs divided by it, states (S, z).

    S_t = e^{g_t} S_{t-1} + k_t^T w_t v_t        z_t = e^{g_t} z_{t-1} + w_t k_t        s_t = scale q_t z_t^T
    out_t = scale q_t S_t / (s_t + eps),  or  scale q_t S_t / max(|s_t|, least_t)

On CuPy arrays one token is one kernel, and calls of many tokens have kernels for z and the
quotient beside those of S (cuda/scan/normaliser.py). Other calls, and gradients of one token, have z as one more column
of S: values w [v, 1].
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from ...core import Computed, Explained, register
from ...ops.averages import divide, divide_by_most, divided_vjp, most, quotient, with_ones, with_sums
from ...runtime.arrays import Array, cast, is_cupy
from .. import core, policy
from ..types import Inputs, Plan

APART = "the sum of weights and the quotient by kernels of their own"


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
    rest: Any = None  # of the core's forward
    own: Any = None  # of the kernels of z
    out: Any = None  # with z as a column: numerators and denominators


def apart(plan: Plan, T: int) -> bool:
    """Whether states of causal calls on CuPy arrays of T tokens are (S, z)."""
    return (T == 1 and not plan.is_ragged) or not policy.is_short_cuda(plan)


def _normaliser(x: AveragedInputs, plan: Plan, wanted: str | None) -> Any:
    """The kernels of z beside those of S, if they compute a call."""
    if not is_cupy(plan.xp) or wanted not in (None, "cuda"):
        return None
    from ..cuda.scan import normaliser

    return normaliser if normaliser.takes(x.core, plan) else None


def has_kernels(x: AveragedInputs, plan: Plan, wanted: str | None) -> bool:
    """Whether a call of many tokens has kernels for z beside those of S."""
    return _normaliser(x, plan, wanted) is not None


def forward(fn: str, x: AveragedInputs, plan: Plan, state: Any, wanted: str | None) -> Computed:
    """(out, (S, z) after the last token, residuals)."""
    saved = Residuals(fn, wanted, x, plan, state)
    if is_cupy(plan.xp) and wanted in (None, "cuda"):
        from ..cuda.token import averages as kernel

        if kernel.takes(x.core, plan, state):
            w, least = (None if y is None else y[..., None] for y in (x.w, x.least))
            return *kernel.forward(x.core, plan, state, w, least, x.eps), saved
    plan = plan._replace(overwrite=False)
    if (kernels := _normaliser(x, plan, wanted)) is not None:
        x, (S, z) = kernels.alike(x, plan), (None, None) if state is None else state
        num, end, rest = core.forward(fn, kernels.weighted(x.core, x.w), plan, S, wanted)
        out, z, own = kernels.divided(x.core, plan, num, z, x.w, x.least, x.eps)
        return out, (end, z), saved._replace(x=x, rest=rest, own=own)
    both, end, rest = _by_columns(saved, plan)
    out = both
    if out is not None:
        out = divide(plan.xp, out, x.eps)[0] if x.least is None else divide_by_most(plan.xp, out, x.least)
    return out, (end[..., :-1], end[..., -1]), saved._replace(rest=rest, out=both)


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
    x, plan, xp = residuals.x, residuals.plan, residuals.plan.xp
    if residuals.own is not None:
        return _backward_by_kernels(residuals, dout, dstate)
    out, rest = residuals.out, residuals.rest
    if rest is None:
        out, _, rest = _by_columns(residuals, plan)
    if dout is not None:
        dout = _divided_vjp(xp, x, out, cast(xp, dout, plan.dtype))
    d, dboth = core.backward(rest, dout, None if dstate is None else _with_sums(plan, dstate))
    dv, dw = d.v[..., :-1], None
    if x.w is not None:
        dw = xp.sum(dv * cast(xp, x.v, plan.dtype), axis=-1) + d.v[..., -1]  # <d.v, [v, 1]>
        dv = x.w[..., None] * dv
    return AveragedInputs(d.q, d.k, dv, d.g, dw), (dboth[..., :-1], dboth[..., -1])


def _backward_by_kernels(residuals: Residuals, dout: Array | None, dstate: Any) -> tuple[AveragedInputs, Any]:
    """backward where the kernels of z have computed the call."""
    from ..cuda.scan import normaliser

    (_, _, x, plan, _, rest, own, _), dnum = residuals, None
    dS, dz = (None, None) if dstate is None else dstate
    if dout is None:
        c = plan.xp.zeros(own.sums.shape, dtype=own.sums.dtype)
    else:
        dnum, c = normaliser.numerators_vjp(plan, own, dout)
    d, dS = core.backward(rest, dnum, dS)
    d, dw, dz = normaliser.add_gradients(x.core, plan, own, d, c, dz)
    return AveragedInputs(d.q, d.k, d.v, d.g, dw), (dS, dz)


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
    if x.v.shape[-3] == 1 or _normaliser(x, plan, wanted) is not None:
        return core.explain_memories(fn, [x.core], plan, wanted, "" if x.v.shape[-3] == 1 else APART)
    return core.explain(fn, x.columns(plan), plan, wanted)


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
