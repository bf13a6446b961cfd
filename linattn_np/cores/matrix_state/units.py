"""Queries and keys divided by their length, and the transpose of that: q^ = q / |q|, k^ = k / |k|, rows of 0 stay 0.

    dx = (dx^ - x^ <x^, dx^>) / |x|

An erase vector that is the key itself is divided with it; one of its own stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable

from ...ground.namespace import Array, cast
from ...pieces.norms import unit, unit_vjp
from .inputs import Inputs, Plan, both


def forward(x: Inputs, plan: Plan, divided: Callable[[Array], Array] | None = None) -> Inputs:
    """x with q, k (and r if it is k) of length 1, in the dtype of the computation; divided: what divides rows."""
    divided = divided or (lambda y: unit(plan.xp, cast(plan.xp, y, plan.dtype)))
    k = divided(x.k)
    return x._replace(q=None if x.q is None else divided(x.q), k=k, r=k if x.r is x.k else x.r)


def backward(x: Inputs, plan: Plan, d: Inputs, back: Callable[[Array, Array], Array] | None = None) -> Inputs:
    """Gradients d of what `forward` made of x as gradients of x; those of a key that erases are summed into k's."""
    xp, dtype, shared = plan.xp, plan.dtype, x.r is x.k
    back = back or (lambda y, dy: unit_vjp(xp, cast(xp, y, dtype), cast(xp, dy, dtype)))
    dq = None if x.q is None or d.q is None else back(x.q, d.q)
    return d._replace(q=dq, k=back(x.k, both(d.k, d.r) if shared else d.k), r=None if shared else d.r)
