"""Tokens of n steps each, of which only the last reads: queries and outputs have a row a token, all else one a step.

For backends that read after every step: queries stand at their token's last step, zeros at the others; of the outputs
every n-th is kept.
"""

from __future__ import annotations

from ...ground.namespace import Array, cast
from .inputs import Plan


def at_last(plan: Plan, x: Array | None) -> Array | None:
    """x (..., T, heads, D) at the last step of each token, 0 at the others: (..., T n, heads, D)."""
    if x is None:
        return None
    xp, (*lead, T, heads, D) = plan.xp, x.shape
    none = xp.zeros_like(xp.broadcast_to(x[..., None, :, :], (*lead, T, plan.steps - 1, heads, D)))
    return xp.reshape(xp.concat([none, x[..., None, :, :]], axis=-3), (*lead, T * plan.steps, heads, D))


def of_last(plan: Plan, x: Array | None) -> Array | None:
    """The rows of x (..., T n, heads, D) at the last step of each token."""
    if x is None:
        return None
    *lead, T, heads, D = x.shape
    return plan.xp.reshape(x, (*lead, T // plan.steps, plan.steps, heads, D))[..., -1, :, :]


def cotangent(plan: Plan, dout: Array | None) -> Array | None:
    """What the other steps read has no gradient."""
    return None if dout is None else at_last(plan, cast(plan.xp, dout, plan.dtype))
