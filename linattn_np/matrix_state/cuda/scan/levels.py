"""Far levels of log-linear attention without erase, as heads of passes that visit a chunk once (levels_wgmma.cu)."""

from __future__ import annotations

from typing import Any

from ....ops.cuda.arguments import address, rows_of
from ....runtime.arrays import Array, cast, dtype_name
from ....runtime.cuda import launch
from ...types import Erase, Inputs, Plan
from .. import arguments
from ..arguments import gate_of
from ..operands import alignment, as_rows, sizes_of
from . import plan as cuts
from . import wgmma
from .launch import Dots, DotsOfPass, ScanBatch, gate_grad, wants_dots


def takes(x: Inputs, plan: Plan) -> bool:
    """Whether the passes compute levels above the sixth of a call that begins without a state."""
    if x.erase is not Erase.NONE or x.q is None or plan.sequences[0].stop == 0:
        return False
    q, k, v = as_rows(plan.xp, x.q, x.k, x.v)
    K, V = k.shape[-1], v.shape[-1]
    return wgmma.takes(dtype_name(q), K, V, alignment((q, k, v), K, V), launch.capability())


def forward(x: Inputs, plan: Plan, first: int, count: int) -> Array:
    """scale q_t S_t[l] of each level first <= l < first + count, (..., T, H count, V); only where l is read."""
    q, k, v = as_rows(plan.xp, x.q, x.k, x.v)
    batch = _batch(x, plan, count, q)
    y = plan.xp.empty((*batch.lead, batch.T, batch.heads, batch.V), dtype=v.dtype)
    _pass(batch, (q, k, v, y), cast(plan.xp, x.g, plan.xp.float32), first, count, (plan.scale, 1.0))
    return y


def backward(x: Inputs, plan: Plan, first: int, count: int, dy: Array) -> Inputs:
    """Gradients of each head and level: of q where it is read, of k and v elsewhere, of g (..., T, H count, 1)."""
    xp = plan.xp
    q, k, v, dy = as_rows(xp, x.q, x.k, x.v, dy)
    batch, g = _batch(x, plan, count, q), cast(xp, x.g, xp.float32)
    dq, dk, dv = (xp.empty((*batch.lead, batch.T, batch.heads, D), dtype=v.dtype) for D in (batch.K, batch.K, batch.V))
    dots = Dots(xp, batch) if wants_dots(batch, plan) else None
    of_q, of_k = (None, None) if dots is None else (dots.of(q, 0), dots.of(k, 1))
    _pass(batch, (k, q, dy, dv), g, first, count, (1.0, plan.scale), True)
    _pass(batch, (v, dy, q, dk), g, first, count, (1.0, plan.scale), True, of_k)
    _pass(batch, (dy, v, k, dq), g, first, count, (plan.scale, 1.0), False, of_q)
    return Inputs(dq, dk, dv, None if dots is None else gate_grad(xp, batch, g, dots)[..., None])


def _batch(x: Inputs, plan: Plan, count: int, q: Array) -> ScanBatch:
    """Sizes with a head for each level."""
    lead, T, heads, _, K, V, N, offsets, longest = sizes_of(x, plan)
    each = (lead, T, heads * count, heads * count, K, V, N, offsets, longest)
    return ScanBatch(*each, dtype_name(q), True, 16, 1, -(-longest // cuts.chunk_of(True)), True)


def _pass(
    batch: ScanBatch,
    arrays: tuple[Array, ...],
    g: Array,
    first: int,
    count: int,
    factors: tuple[float, float],
    reverse: bool = False,
    dots: Any = None,
) -> None:
    """One pass over q, k, v, out; as launch.scan."""
    (q, k, v, out), heads, of, (read, write) = arrays, batch.heads, dots or DotsOfPass(), factors
    how = wgmma.level_pass(k.shape[-1], v.shape[-1], True, reverse, dots is not None)
    dot_sums, states, products, marks = of.pointers
    rows = {n: rows_of(y, heads) for n, y in (("q", q), ("k", k), ("v", v), ("x", of.x), ("out", out))}
    packed = arguments.LEVEL_PASS.pack(
        **rows, g=gate_of(g, heads), offsets=address(batch.offsets), dots=dot_sums, states=states, products=products,
        marks=marks, tokens=batch.tokens, T=batch.T, heads=heads, first=first, count=count, read=read,
        write=write)  # fmt: skip
    how.launch(batch.N * heads, packed, (q, k, v, of.x, out, g, batch.offsets, *of.arrays))
