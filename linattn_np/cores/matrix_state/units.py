"""Queries and keys divided by their length, and the transpose of that: q^ = q / |q|, k^ = k / |k|, rows of 0 stay 0.

    dx = (dx^ - x^ <x^, dx^>) / |x|

An erase vector that is the key itself is divided with it; one of its own stays as it is. Compiled loops divide rows
themselves (numba_units.py), and so do kernels (cuda_projections.py).
"""

from __future__ import annotations

from collections.abc import Callable

from ...ground.namespace import Array, cast
from ...pieces.norms import unit, unit_vjp
from . import cuda_projections
from .inputs import Inputs, Plan, both

Pair = tuple[Array | None, ...]  # of queries and of keys


def forward(x: Inputs, plan: Plan, divided: Callable[[Plan, Pair], Pair] | None = None) -> Inputs:
    """x with q, k (and r if it is k) of length 1, in the dtype of the computation; divided: what divides rows."""
    q, k = (divided or in_arrays)(plan, (x.q, x.k))
    return x._replace(q=q, k=k, r=k if x.r is x.k else x.r)


def backward(
    x: Inputs, plan: Plan, d: Inputs, back: Callable[[Plan, Pair, Pair], Pair] | None = None
) -> Inputs:
    """Gradients d of what `forward` made of x as gradients of x; those of a key that erases are summed into k's."""
    shared = x.r is x.k
    dk = both(d.k, d.r) if shared else d.k
    dq, dk = (back or in_arrays_vjp)(plan, (None if d.q is None else x.q, x.k), (d.q, dk))
    return d._replace(q=dq, k=dk, r=None if shared else d.r)


def in_arrays(plan: Plan, rows: Pair) -> Pair:
    """Rows divided by their length, by array calls or, on CuPy arrays, by one kernel."""
    wide = tuple(None if y is None else cast(plan.xp, y, plan.dtype) for y in rows)
    if cuda_projections.takes(plan.xp, wide):
        return cuda_projections.unit_rows(plan.xp, wide)
    return tuple(None if y is None else unit(plan.xp, y) for y in wide)


def in_arrays_vjp(plan: Plan, rows: Pair, grads: Pair) -> Pair:
    """The transpose, for those rows that are given."""
    xp = plan.xp
    rows, grads = (tuple(None if y is None else cast(xp, y, plan.dtype) for y in pair) for pair in (rows, grads))
    if cuda_projections.takes(xp, rows):
        return cuda_projections.unit_rows_vjp(xp, rows, grads)
    return tuple(None if y is None else unit_vjp(xp, y, dy) for y, dy in zip(rows, grads, strict=True))


def in_kernels(plan: Plan, rows: Pair) -> Pair:
    """Rows divided by their length in their own dtype, where kernels read them."""
    if cuda_projections.takes(plan.xp, rows):
        return cuda_projections.unit_rows(plan.xp, rows)
    made = in_arrays(plan, rows)
    return tuple(None if y is None else cast(plan.xp, z, y.dtype) for y, z in zip(rows, made, strict=True))


def in_kernels_vjp(plan: Plan, rows: Pair, grads: Pair) -> Pair:
    """The transpose, in the dtype of the rows."""
    if cuda_projections.takes(plan.xp, rows) and cuda_projections.takes(plan.xp, grads):
        return cuda_projections.unit_rows_vjp(plan.xp, rows, grads)
    return in_arrays_vjp(plan, rows, grads)
