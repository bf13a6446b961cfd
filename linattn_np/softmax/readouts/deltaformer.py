"""Deltaformer: softmax attention over values u that solve a linear system, as in the delta rule.

    u_t = v_t - beta_t sum_{j < t} p_tj u_j,   p_tj = e^{z_tj} / sum_{i < t} e^{z_ti},
    z_tj = scale w_t . k_j + sum_{j < s <= t} g_s          w = k if it is not given

The attention itself is the core's, with the values u; the cache holds keys and u.
"""

from __future__ import annotations

import functools
from math import prod
from typing import Any, NamedTuple

from ...core import Computed, Explained, register
from ...ops.sums import added
from ...runtime.arrays import Array, cast, device
from ...runtime.constants import constant_zeros
from .. import heads, sequences, states
from ..array import delta_tiles
from ..core import CORE, choose, pairs
from ..types import DeltaInputs, GatedCache, Inputs, KeyValueCache, SoftmaxPlan
from . import delta_definition


class DeltaformerResiduals(NamedTuple):
    """Residuals of a forward pass."""

    x: DeltaInputs
    plan: SoftmaxPlan
    backend: str
    state: Any  # the cache as it is used: without decays if there are no gates
    system: Any  # (u, residuals of the linear system)
    attention: Any  # the core's


MODULES = {"reference": delta_definition, "chunks": delta_tiles}


class Deltaformer(states.GivesStates):
    """The linear system, then attention."""

    def forward(self, fn: str, x: DeltaInputs, plan: SoftmaxPlan, state: Any, wanted: str | None) -> Computed:
        """(out, final state, residuals)."""
        if x.g is None and state is not None:  # tokens of the cache may have decayed
            x = x._replace(g=plan.xp.zeros(x.v.shape[:-1], dtype=plan.dtype, device=device(x.v)))
        backend = choose(fn, x, plan, wanted)
        system = solve(backend, plan, x, state)
        out, end, attention = CORE.forward(fn, Inputs(x.q, x.k, system[0], x.g), plan, state, wanted)
        if x.g is None:
            end = states.each(functools.partial(without_decays, plan), end)
        return out, end, DeltaformerResiduals(x, plan, backend, state, system, attention)

    def backward(self, residuals: DeltaformerResiduals, dout: Array | None, dstate: Any) -> tuple[Any, Any]:
        """Gradients of the inputs and of the initial state."""
        x, plan, backend, state, system, attention = residuals
        if x.g is None:
            dstate = states.each(lambda d: KeyValueCache(d.k, d.v, d.length), dstate)
        d, dbegin = CORE.backward(attention, dout, dstate)
        more, dbeta, dpast = solve_vjp(backend, plan, x, state, system, d.v)
        plus = functools.partial(added, plan.xp, dtype=plan.dtype)
        dw, dg = more.q, None if x.g is None else plus(d.g, more.g)
        if x.w is None:
            dw, more = None, more._replace(k=plus(more.k, dw))
        dk = added(plan.xp, d.k, more.k, dtype=x.k.dtype)
        if dbegin is not None:
            dbegin = type(dbegin)(*(y + z for y, z in zip(dbegin, dpast, strict=True)))
        return DeltaInputs(d.q, dk, more.v, dbeta, dw, dg), dbegin

    def reads_out(self, residuals: DeltaformerResiduals) -> bool:
        """Backward reads the output."""
        return residuals.plan.normalize

    def explain(self, fn: str, x: DeltaInputs, plan: SoftmaxPlan, wanted: str | None) -> Explained:
        """2 (K + V) operations for each pair, of the system and of the attention."""
        found = CORE.explain(fn, Inputs(x.q, x.k, x.v, x.g), plan, wanted, of=x)
        K, V, states = x.k.shape[-1], x.v.shape[-1], prod(x.v.shape[:-3]) * x.v.shape[-2]
        lengths = [s.stop - s.start for s in plan.sequences]
        total = found.operations + 2.0 * (K + V) * pairs(of_system(plan, x)[0], 0) * states
        reason = "requested" if wanted else "the default path"
        least = 3 * K * V // (K + V) if K + V else 0
        reason += f"; from T = {least} on more operations than the delta rule's 6 K V a token"
        each = total / max(sum(lengths) * states, 1)
        return found._replace(reason=reason, operations=total, operations_per_token=each)


def without_decays(plan: SoftmaxPlan, end: KeyValueCache) -> GatedCache:
    """The cache of tokens that have not decayed."""
    xp, shape = plan.xp, end.v.shape[:-1]
    if plan.returns_state or plan.states_at is not None:
        b = xp.zeros(shape, dtype=plan.dtype, device=device(end.v))
    else:  # of which the shape alone is read
        b = xp.broadcast_to(constant_zeros(xp, (1,), plan.dtype, device(end.v)), shape)
    return GatedCache(end.k, end.v, b, end.length)


def of_system(plan: SoftmaxPlan, x: DeltaInputs) -> tuple[SoftmaxPlan, Inputs]:
    """The system as attention of w on earlier tokens."""
    w = x.k if x.w is None else x.w
    return plan._replace(strict=True, causal=True), Inputs(w, x.k, x.v, x.g)


def solve(backend: str, plan: SoftmaxPlan, x: DeltaInputs, state: Any) -> tuple[Array, Any]:
    """(u (..., T, H, V), residuals)."""
    plan, given = of_system(plan, x)
    if backend == "numba":
        from ..cpu import delta_calls

        return delta_calls.forward(plan, given, x.beta, state)
    if backend == "cuda":
        from ..cuda import system

        return system.forward(plan, given, x.beta)
    found, us = [], []
    for s, own, row in sequences.each_sequence(plan, given, state):
        results = None
        if 0 not in own.v.shape[:-1]:
            parts = heads.parts_of(plan, own, row)
            beta = strengths(plan, x.beta[..., s.start : s.stop, :], own)
            results = MODULES[backend].forward(plan, parts, beta)
            us.append(heads.join(plan.xp, results[0], own.v.shape))
        found.append(results)
    if not us:
        return plan.xp.zeros(x.v.shape, dtype=plan.dtype, device=device(x.v)), found
    return us[0] if len(us) == 1 else plan.xp.concat(us, axis=-3), found


def strengths(plan: SoftmaxPlan, beta: Array, own: Inputs) -> Array:
    """beta (..., T, H) as (..., G, R, T, 1)."""
    return heads.split(plan.xp, cast(plan.xp, beta, plan.dtype)[..., None], heads.groups(own))


def solve_vjp(
    backend: str, plan: SoftmaxPlan, x: DeltaInputs, state: Any, solved: Any, du: Array
) -> tuple[Inputs, Array, Any]:
    """(gradients of w, k, v, g as Inputs, of beta, of the cache)."""
    plan, given = of_system(plan, x)
    if backend == "numba":
        from ..cpu import delta_calls

        return delta_calls.backward(plan, given, x.beta, state, solved, du)
    if backend == "cuda":
        from ..cuda import system

        return system.backward(plan, given, x.beta, solved[1], du)
    xp, found, dbetas = plan.xp, [], []
    for results, (s, own, row) in zip(solved[1], sequences.each_sequence(plan, given, state), strict=True):
        beta = x.beta[..., s.start : s.stop, :]
        if results is None:
            found.append(sequences.zeros(plan, own, row))
            dbetas.append(xp.zeros(beta.shape, dtype=plan.dtype, device=device(beta)))
            continue
        parts = heads.parts_of(plan, own, row)
        d_own = heads.split(xp, cast(xp, du[..., s.start : s.stop, :, :], plan.dtype), heads.groups(given))
        d, dbeta = MODULES[backend].backward(plan, parts, strengths(plan, beta, own), results, d_own)
        found.append(sequences.joined(plan, own, row, d))
        dbetas.append(heads.join(xp, dbeta, (*beta.shape, 1))[..., 0])
    more, dpast = sequences.gathered(plan, given, found)
    return more, dbetas[0] if len(dbetas) == 1 else xp.concat(dbetas, axis=-2), dpast


register(Deltaformer(), DeltaInputs)
