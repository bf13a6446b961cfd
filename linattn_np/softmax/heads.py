"""One sequence of a call with heads before tokens (..., G, R, T, D), and the way back; nothing is copied."""

from __future__ import annotations

from typing import Any

from ..runtime.arrays import Array, Namespace, cast, device, is_mutable, sum_to, swap
from ..runtime.shapes import Sequence
from .cache import count, positions
from .types import Inputs, Parts, Past, SoftmaxPlan


def groups(x: Inputs) -> int:
    """G: the fewest heads of any array."""
    return min(y.shape[-2] for y in (x.q, x.k, x.v) if y is not None)


def split(xp: Namespace, y: Array, G: int) -> Array:
    """(..., T, H, D) as a view (..., G, H / G, T, D)."""
    y = swap(xp, y, -3)
    return xp.reshape(y, (*y.shape[:-3], G, y.shape[-3] // max(G, 1), *y.shape[-2:]))


def join(xp: Namespace, y: Array, shape: tuple[int, ...]) -> Array:
    """(..., G, R, T, D) as (..., T, H, D) of this shape, summed over the heads that share a head of it."""
    *lead, T, H, D = shape
    y = sum_to(xp, y, (*lead, y.shape[-4], H // max(y.shape[-4], 1), T, D))
    return swap(xp, xp.reshape(y, (*lead, H, T, D)), -3)


def row_of(plan: SoftmaxPlan, x: Inputs, state: Any, s: Sequence) -> Any:
    """The cache of one sequence, with the batch axes of x, in the dtype of the computation."""
    if state is None:
        return None
    lead = x.v.shape[:-3]
    rows = state._asdict() if s.row is None else {n: y[s.row, ...] for n, y in state._asdict().items()}
    each = {n: count(plan.xp, y) if n == "length" else cast(plan.xp, y, plan.dtype) for n, y in rows.items()}
    if s.row is not None:
        each = {n: plan.xp.reshape(y, (*lead, *y.shape)) for n, y in each.items()}
    return type(state)(**each)


def tokens_of(x: Inputs, s: Sequence) -> Inputs:
    """The tokens of one sequence; queries that are not causal may have their own number."""
    q, k, v, w = (None if y is None else y[..., s.start : s.stop, :, :] for y in (x.q, x.k, x.v, x.w))
    g, beta = (None if y is None else y[..., s.start : s.stop, :] for y in (x.g, x.beta))
    bias = x.bias if s.row is None or x.bias is None else x.bias[..., s.start : s.stop, :, :]  # and all columns
    return Inputs(x.q if s.row is None else q, k, v, g, x.sinks, w, beta, bias)


def parts_of(plan: SoftmaxPlan, x: Inputs, cache: Any) -> Parts:
    """A sequence and its cache with heads before tokens, queries times the scale."""
    xp, G = plan.xp, groups(x)
    q, k, v, w, bias = (None if y is None else split(xp, cast(xp, y, plan.dtype), G) for y in (*x[:3], x.w, x.bias))
    g, beta = (None if y is None else split(xp, cast(xp, y, plan.dtype)[..., None], G)[..., 0] for y in (x.g, x.beta))
    sinks = (
        None if x.sinks is None else xp.reshape(cast(xp, x.sinks, plan.dtype), (G, x.sinks.shape[0] // max(G, 1), 1, 1))
    )
    return Parts(None if q is None else plan.scale * q, k, v, g, sinks, _past(plan, cache, G), w, beta, bias)


def _past(plan: SoftmaxPlan, cache: Any, G: int) -> Past | None:
    if cache is None or not cache.v.shape[-3]:
        return None
    xp, L, n = plan.xp, cache.v.shape[-3], count(plan.xp, cache.length)
    p = positions(xp, n, L)
    age = xp.where(p < 0, p, n[..., None] - 1 - p)[..., None, None, None, :]
    b = getattr(cache, "b", None)
    b = None if b is None else split(xp, b[..., None], G)[..., 0]
    return Past(split(xp, cache.k, G), split(xp, cache.v, G), b, age)


class Sum:
    """A sum (..., T, D) of pieces of rows."""

    def __init__(self, xp: Namespace, shape: tuple[int, ...], like: Array):
        self.xp, self.shape = xp, shape
        self.total = xp.zeros(shape, dtype=like.dtype, device=device(like))

    def add(self, start: int, piece: Array) -> None:
        """Add to the rows from `start` on, summed over heads that are shared."""
        xp, (*lead, T, D), n = self.xp, self.shape, piece.shape[-2]
        piece = sum_to(xp, piece, (*lead, n, D))
        if is_mutable(xp):
            self.total[..., start : start + n, :] += piece
            return
        zeros = [xp.zeros((*lead, m, D), dtype=piece.dtype, device=device(piece)) for m in (start, T - start - n)]
        self.total = self.total + xp.concat([zeros[0], piece, zeros[1]], axis=-2)

    def add_columns(self, start: int, column: int, piece: Array) -> None:
        """Likewise columns from `column` on; zeros beside them."""
        xp, lead = self.xp, piece.shape[:-1]
        zeros = [xp.zeros((*lead, m), dtype=piece.dtype, device=device(piece))
                 for m in (column, self.shape[-1] - column - piece.shape[-1])]  # fmt: skip
        self.add(start, xp.concat([zeros[0], piece, zeros[1]], axis=-1))


def sum_like(xp: Namespace, y: Array) -> Sum:
    """A sum of the shape of y."""
    return Sum(xp, tuple(y.shape), y)
