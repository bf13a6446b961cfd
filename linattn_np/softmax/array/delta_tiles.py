"""The linear system of deltaformer in tiles: a block after the other, its earlier keys tile by tile (tiles.py).

    (1 + diag(beta) P) u = v - diag(beta) (what earlier keys give),   P strictly lower

Backward goes from the last block to the first (`readouts/delta_definition.py` has the equations).
"""

from __future__ import annotations

from ...ops import triangular
from ...runtime.arrays import Array
from ...runtime.shapes import Chunk
from ..types import Parts, SoftmaxPlan
from .tiles import TileGradients, begin, blocks, logits, normalised, tiles_of, weights


def forward(plan: SoftmaxPlan, x: Parts, beta: Array) -> tuple[Array, Array, Array]:
    """(u, r (..., G, R, T, V), the logs of the sums (..., G, R, T, 1)).   beta (..., G, R, T, 1)."""
    keys, us, rs, logs = blocks(plan, x, False), dict[int, Array](), list[Array](), list[Array]()
    for rows in keys:
        us[rows.start], r, log = _block(plan, x, beta[..., rows.start : rows.stop, :], rows, (keys, us))
        rs.append(r)
        logs.append(log)
    return tuple(plan.xp.concat(y, axis=-2) for y in (list(us.values()), rs, logs))


def _block(
    plan: SoftmaxPlan, x: Parts, beta: Array, rows: Chunk, known: tuple[list[Chunk], dict[int, Array]]
) -> tuple[Array, Array, Array]:
    """u, r and the logs of the sums of a block, with u of earlier ones."""
    xp, (keys, us), q, own = plan.xp, known, x.q[..., rows.start : rows.stop, :], None
    m, total, r = begin(plan, x, q)
    for tile in tiles_of(plan, x, rows, keys):
        z = logits(plan, tile)
        if tile.at == rows:
            own = z
            continue
        m, total, faded, e = weights(xp, m, total, z)
        r = faded * r + e @ (tile.v if tile.at is None else us[tile.at.start])
    m, total, faded, e = weights(xp, m, total, own)
    factor, log = normalised(plan, m, total)
    factor = 1 / factor if plan.normalize else factor
    r, P = factor * (faded * r), factor * e
    u = triangular.solve(xp, triangular.unit_lower(xp, beta * P), x.v[..., rows.start : rows.stop, :] - beta * r)
    return u, r + P @ u, log


def backward(
    plan: SoftmaxPlan, x: Parts, beta: Array, results: tuple[Array, Array, Array], du: Array
) -> tuple[Parts, Array]:
    """(gradients of the sequence and of the cache, dbeta); x has the values v."""
    xp, (u, r, logs) = plan.xp, results
    x = x._replace(v=u)
    keys, sums, dv, dbeta = blocks(plan, x, False), TileGradients(plan, x, du), list[Array](), list[Array]()
    for rows in reversed(keys):
        log, b, own_r, own_du, more = (y[..., rows.start : rows.stop, :] for y in (logs, beta, r, du, sums.v.total))
        d, mean, totals = own_du, None, []
        for tile in tiles_of(plan, x, rows, keys):
            p = xp.exp(logits(plan, tile) - log)
            if tile.at == rows:
                y = triangular.solve_transposed(xp, triangular.unit_lower(xp, b * p), own_du + more)
                dv.append(y)
                dbeta.append(-xp.sum(y * own_r, axis=-1, keepdims=True))
                d, mean = -b * y, b * dbeta[-1] if plan.normalize else None
            total = sums.add(rows, tile, p, d, mean)
            if total is not None:
                totals.append((tile.at, total))
        sums.cross(totals)
    return sums.done()._replace(v=xp.concat(dv[::-1], axis=-2)), xp.concat(dbeta[::-1], axis=-2)
