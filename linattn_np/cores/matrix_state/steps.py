"""Tokens of n steps, of which the first fades and the last reads: q, g and out have a row a token, all else one a step.

For backends whose steps are tokens: log decays stand at their token's first step and queries at its last, zeros at the
others; of the outputs every n-th is kept.
"""

from __future__ import annotations

from ...ground.namespace import Array
from .inputs import Inputs, Plan


def forward(x: Inputs, plan: Plan) -> Inputs:
    """x with a row a step."""
    return x._replace(q=at_last(plan, x.q), g=_spread(plan, x.g, first=True))


def backward(d: Inputs, plan: Plan) -> Inputs:
    """Gradients by what `forward` made as gradients by what it took."""
    return d._replace(q=of_last(plan, d.q), g=_rows(plan, d.g, 0))


def at_last(plan: Plan, x: Array | None) -> Array | None:
    """x (..., T, heads, D) at the last step of each token, 0 at the others: (..., T n, heads, D)."""
    return _spread(plan, x, first=False)


def of_last(plan: Plan, x: Array | None) -> Array | None:
    """The rows of x (..., T n, heads, D) at the last step of each token."""
    return _rows(plan, x, -1)


def _spread(plan: Plan, x: Array | None, first: bool) -> Array | None:
    if x is None:
        return None
    xp, (*lead, T, heads, D) = plan.xp, x.shape
    none = xp.zeros_like(xp.broadcast_to(x[..., None, :, :], (*lead, T, plan.steps - 1, heads, D)))
    both = [x[..., None, :, :], none]
    return xp.reshape(xp.concat(both if first else both[::-1], axis=-3), (*lead, T * plan.steps, heads, D))


def _rows(plan: Plan, x: Array | None, step: int) -> Array | None:
    if x is None:
        return None
    *lead, T, heads, D = x.shape
    return plan.xp.reshape(x, (*lead, T // plan.steps, plan.steps, heads, D))[..., step, :, :]
