"""Queries and keys divided by their length, and the transpose of that: q^ = q / |q|, k^ = k / |k|, rows of 0 stay 0.

    dx = (dx^ - x^ <x^, dx^>) / |x|

An erase vector that is the key itself is divided with it; one of its own stays as it is.
"""

from __future__ import annotations

from ...ground.namespace import Array, cast
from ...pieces.norms import unit, unit_vjp
from ...pieces.rows import in_blocks
from .inputs import Inputs, Plan, both


def forward(x: Inputs, plan: Plan) -> Inputs:
    """x with q, k (and r if it is k) of length 1, in the dtype of the computation."""
    xp = plan.xp

    def divided(y: Array | None) -> Array | None:
        return None if y is None else in_blocks(lambda y: unit(xp, y))(cast(xp, y, plan.dtype))

    k = divided(x.k)
    return x._replace(q=divided(x.q), k=k, r=k if x.r is x.k else x.r)


def backward(x: Inputs, plan: Plan, d: Inputs) -> Inputs:
    """Gradients d of what `forward` made of x as gradients of x; those of a key that erases are summed into k's."""
    xp = plan.xp

    def back(y: Array | None, dy: Array | None) -> Array | None:
        if y is None or dy is None:
            return None
        y, dy = cast(xp, y, plan.dtype), cast(xp, dy, plan.dtype)
        return in_blocks(lambda y, dy: unit_vjp(xp, y, dy))(y, dy)

    shared = x.r is x.k
    return d._replace(q=back(x.q, d.q), k=back(x.k, both(d.k, d.r) if shared else d.k), r=None if shared else d.r)
