"""Stick-breaking attention in tiles: blocks of keys from the newest to the oldest; memory grows with T.

The rest of the stick after the later keys is a running sum of logs. Backward recomputes the shares in the same order,
stores the shares of one block of queries, and traverses them from the oldest key on.
`readouts/stick_definition.py` has the equations.
"""

from __future__ import annotations

from ...runtime.arrays import Array, device, sum_to
from ...runtime.shapes import Chunk
from ..heads import sum_like
from ..readouts.stick_definition import logits_vjp, shares
from ..types import Parts, Past, SoftmaxPlan
from .tiles import begin, blocks, logits, tiles_of


def forward(plan: SoftmaxPlan, x: Parts) -> tuple[Array, Array]:
    """(out (..., G, R, T, V), minus the logs of the rest (..., G, R, T, 1))."""
    keys, found, lefts = blocks(plan, x, False), [], []
    for rows in blocks(plan, x, True):
        q = x.q[..., rows.start : rows.stop, :]
        _, left, out = begin(plan, x, q)  # 0, and 0
        for tile in tiles_of(plan, x, rows, keys):
            a, _, _, left = shares(plan.xp, logits(plan, tile), left)
            out = out + a @ tile.v
        found.append(out)
        lefts.append(left)
    return plan.xp.concat(found, axis=-2), plan.xp.concat(lefts, axis=-2)


def backward(plan: SoftmaxPlan, x: Parts, out: Array, left: Array, dout: Array) -> Parts:
    """Gradients of the sequence and of the cache."""
    xp, keys = plan.xp, blocks(plan, x, False)
    sums = sum_like(xp, x.q), sum_like(xp, x.k), sum_like(xp, x.v)
    past = () if x.past is None else (sum_like(xp, x.past.k), sum_like(xp, x.past.v))
    for rows in blocks(plan, x, True):
        _rows_vjp(plan, x, rows, keys, dout[..., rows.start : rows.stop, :], (sums, past))
    more = Past(past[0].total, past[1].total, None, None) if past else None
    return Parts(sums[0].total, sums[1].total, sums[2].total, None, None, more)


def _rows_vjp(plan: SoftmaxPlan, x: Parts, rows: Chunk, keys: list[Chunk], d: Array, sums: tuple) -> None:
    """What a block of queries adds to the gradients."""
    xp, T, q, found = plan.xp, plan.xp.matrix_transpose, x.q[..., rows.start : rows.stop, :], []
    (dq, *own), past = sums
    left = xp.zeros((*q.shape[:-1], 1), dtype=plan.dtype, device=device(q))
    for tile in tiles_of(plan, x, rows, keys):
        of = shares(xp, logits(plan, tile), left)
        left, G = of.left, sum_to(xp, of.a * (d @ T(tile.v)), of.a.shape)
        (dk, dv), start = (past, 0) if tile.at is None else (own, tile.at.start)
        dv.add(start, T(of.a) @ d)
        found.append((tile, of, G, dk, start))
    before = xp.zeros_like(left)
    for tile, of, G, dk, start in reversed(found):
        dz, before = logits_vjp(xp, of, G, before)
        dq.add(rows.start, plan.scale * (dz @ tile.k))
        dk.add(start, T(dz) @ q)
