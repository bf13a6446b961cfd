"""An average of the past whose weights e^k decay, and of the token itself with a bonus, in log space.

    S_t = e^{-w} S_{t-1} + e^{k_t} v_t,   n_t = e^{-w} n_{t-1} + e^{k_t}
    out_t = (scale S_{t-1} + e^{u + k_t} v_t) / (scale n_{t-1} + e^{u + k_t})

A state is (S, n, m): e^m S and e^m n are these sums, m_t = max(m_{t-1} - w, k_t), so every exponent is <= 0. Outputs do
not depend on m: gradients are those at fixed m, and of the m of the final state. Compiled loops (cpu/log_average.py)
and a kernel (cuda/average.py) go through the tokens once; by array calls the sums are channels of the core.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ...core import Computation, Computed, Explained, register
from ...ops.stabiliser import Gauge, delayed, gauge, joined, last, last_vjp, row
from ...runtime.arrays import Array, cast, device, is_cupy, over_tokens, sum_dtype
from .. import policy
from ..core import CORE, unsupported_reason
from ..types import AVERAGE, AverageInputs, GatedInputs, Inputs, Plan
from ..types import Residuals as CoreResiduals
from .gated import GATED

NOTHING = -1.0e30  # m without a token: e^m is 0, and a number less m is one
State = tuple[Array, Array, Array]  # S, n, m (..., D)


class Weights(NamedTuple):
    """The weights of the past and of the token itself, in a gauge of their own, and the sums that they are of."""

    past: Array  # e^{m_{t-1} - n_t}
    own: Array  # e^{u + k_t - n_t}
    values: Array
    total: Array


class Residuals(NamedTuple):
    """Residuals of a forward pass."""

    x: AverageInputs
    plan: Plan
    state: State | None
    marks: Any  # of the compiled loops and the kernel: the states that segments of tokens begin with
    arrays: tuple[Gauge, Weights, Array, CoreResiduals] | None  # of array calls; the third are the final sums [S, n]


class Average(Computation):
    """The computation of AverageInputs."""

    def forward(self, fn: str, x: AverageInputs, plan: Plan, state: State | None, wanted: str | None) -> Computed:
        """(out, the final state, residuals)."""
        if wanted in (None, "numba") and unsupported_reason(None, plan, "numba") is None:
            from ..cpu import log_average_calls

            out, end, marks = log_average_calls.forward(plan, x, state)
            return out, end, Residuals(x, plan, state, marks, None)
        if (gated := of_kernel(x, plan, wanted)) is not None:
            from ..cuda import average

            out, end, marks = average.forward(plan, gated, state)
            return out, end, Residuals(x, plan, state, marks, None)
        at, D = gauge_of(plan, x, state), x.v.shape[-1]
        before = None if state is None else both(plan, *state[:2])
        sums, both_end, core = CORE.forward(fn, sums_of(plan, x, at), plan, before, wanted)
        weights = weights_of(plan, x, at, sums)
        end = (both_end[..., :D], both_end[..., D:], cast(plan.xp, last(plan.xp, at, plan.sequences), plan.dtype))
        return weights.values / weights.total, end, Residuals(x, plan, state, None, (at, weights, both_end, core))

    def backward(self, residuals: Residuals, dout: Array | None, dstate: State | None) -> tuple[AverageInputs, State]:
        """Gradients of the inputs and of the initial state."""
        x, plan, state, marks, arrays = residuals
        if arrays is None and (gated := of_kernel(x, plan, "cuda")) is not None:
            from ..cuda import average

            grads, ends = average.backward(plan, gated, marks, dout, dstate)
            return AverageInputs(grads.y, grads.x, *grads.parameters), ends
        if arrays is None:
            from ..cpu import log_average_calls

            return log_average_calls.backward(plan, x, marks, dout, dstate)
        (at, weights, end, core), xp, D = arrays, plan.xp, x.v.shape[-1]
        dsums, parts = None, [AverageInputs(None, None, None, None)]
        if dout is not None:
            dsums, own = read_vjp(plan, x, weights, dout)
            parts.append(own)
        dend, dm_0 = None, None
        if dstate is not None:
            dend, (dS, dn, dm) = both(plan, *dstate[:2]), dstate
            dm = cast(xp, dm, plan.dtype) - dS * end[..., :D] - dn * end[..., D:]
            da, dk, dm_0 = last_vjp(xp, at, plan.sequences, cast(xp, dm, at.m.dtype))
            dw = -cast(xp, over_tokens(xp, da), plan.dtype)
            parts.append(AverageInputs(cast(xp, dk, plan.dtype), None, dw, None))
        d, begin = CORE.backward(core, dsums, dend)
        parts.append(sums_vjp(plan, x, at, d))
        dS, dn = begin[..., :D], begin[..., D:]
        found = AverageInputs(*(total(each) for each in zip(*parts, strict=True)))
        return found, (dS, dn, state_vjp(plan, state, dS, dn, dm_0))

    def explain(self, fn: str, x: AverageInputs, plan: Plan, wanted: str | None) -> Explained:
        """As the core explains 2 D channels, or formulas of them."""
        if (gated := of_kernel(x, plan, wanted)) is not None:
            return GATED.explain(fn, gated, plan, wanted)
        xp, (*lead, D) = plan.xp, x.v.shape
        y = xp.broadcast_to(xp.zeros((1,), dtype=plan.dtype, device=device(x.v)), (*lead, 2 * D))
        return CORE.explain(fn, Inputs(y, None, y), plan, wanted)


def of_kernel(x: AverageInputs, plan: Plan, wanted: str | None) -> GatedInputs | None:
    """The inputs of the kernel that computes a call; None: others do."""
    if not is_cupy(plan.xp) or wanted not in (None, "cuda") or not (policy.CUDA or wanted):
        return None
    from ..cuda import calls

    own = GatedInputs(AVERAGE, x.v, x.k, None, (x.w, x.u))
    return own if calls.unsupported_reason(own, plan) is None else None


def total(parts: tuple[Array | None, ...]) -> Array | None:
    """The sum of the parts that are not None."""
    given = [y for y in parts if y is not None]
    return sum(given[1:], given[0]) if given else None


def both(plan: Plan, x: Array, y: Array) -> Array:
    """[x, y]"""
    return plan.xp.concat([cast(plan.xp, x, plan.dtype), cast(plan.xp, y, plan.dtype)], axis=-1)


def gauge_of(plan: Plan, x: AverageInputs, state: State | None) -> Gauge:
    """-w and k_t in the gauge m_t = max(m_{t-1} - w, k_t)."""
    xp, wide, (*lead, _, D) = plan.xp, sum_dtype(plan.xp, x.v), x.v.shape
    k = cast(xp, x.k, wide)
    lead = lead if plan.sequences[0].row is None else [len(plan.sequences)]
    m_0 = xp.full((*lead, D), NOTHING, dtype=plan.dtype, device=device(x.v)) if state is None else state[2]
    positions = None if plan.chunk_size == 1 else ()  # None: all
    return gauge(xp, xp.broadcast_to(-cast(xp, x.w, wide), k.shape), k, m_0, plan.sequences, plan.dtype, positions)


def sums_of(plan: Plan, x: AverageInputs, at: Gauge) -> Inputs:
    """The sums of e^k v and of e^k side by side: x = e^{k - m} [v, 1], g = m_{t-1} - w - m_t."""
    values = at.write * cast(plan.xp, x.v, plan.dtype)
    return Inputs(both(plan, values, at.write), None, both(plan, at.decay, at.decay))


def sums_vjp(plan: Plan, x: AverageInputs, at: Gauge, d: Inputs) -> AverageInputs:
    """At fixed m."""
    D = x.v.shape[-1]
    dk = at.write * (d.x[..., :D] * cast(plan.xp, x.v, plan.dtype) + d.x[..., D:])
    return AverageInputs(dk, at.write * d.x[..., :D], -over_tokens(plan.xp, d.g[..., :D] + d.g[..., D:]), None)


def weights_of(plan: Plan, x: AverageInputs, at: Gauge, sums: Array) -> Weights:
    """n_t = max(m_{t-1}, u + k_t)"""
    xp, D = plan.xp, x.v.shape[-1]
    before = joined(xp, [delayed(xp, at.m[..., s.start : s.stop, :], cast(xp, row(at.m_0, s), at.m.dtype))
                         for s in plan.sequences])  # fmt: skip
    own = cast(xp, x.u, before.dtype) + cast(xp, x.k, before.dtype)
    n = xp.maximum(before, own)
    past, own = (cast(xp, xp.exp(y - n), plan.dtype) for y in (before, own))
    values = past * sums[..., :D] + own * cast(xp, x.v, plan.dtype)
    return Weights(past, own, values, past * sums[..., D:] + own)


def read_vjp(plan: Plan, x: AverageInputs, at: Weights, dout: Array) -> tuple[Array, AverageInputs]:
    """(gradient of the sums before each token, the token's own part): dvalues = dout / total, dtotal = -dvalues out."""
    dvalues = cast(plan.xp, dout, plan.dtype) / at.total
    dtotal = -dvalues * (at.values / at.total)
    dk = at.own * (dvalues * cast(plan.xp, x.v, plan.dtype) + dtotal)
    own = AverageInputs(dk, at.own * dvalues, None, over_tokens(plan.xp, dk))
    return both(plan, at.past * dvalues, at.past * dtotal), own


def state_vjp(plan: Plan, state: State | None, dS: Array, dn: Array, dm: Array | None) -> Array:
    """The gradient of m_0: the sums are e^{m_0} S_0 and e^{m_0} n_0; dm: through m of the final state."""
    if state is None:
        return dn
    dm_0 = dS * cast(plan.xp, state[0], plan.dtype) + dn * cast(plan.xp, state[1], plan.dtype)
    return dm_0 if dm is None else dm_0 + cast(plan.xp, dm, dm_0.dtype)


register(Average(), AverageInputs)
