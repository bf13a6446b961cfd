"""Tiles of PaTH: queries are mapped from one block of keys to the next, nearest first (path/blocks.py).

With q^(J) the queries of a block as they meet the keys of block J, q^(J-1) = q^(J) R_J and, from the furthest block on,

    dR_J += q^(J)^T dq^(J-1),   dq^(J) = sum_i dz_ij k~_j + dq^(J-1) R_J^T
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from ...runtime.arrays import Array, Namespace, device, sum_to
from ...runtime.shapes import Chunk
from ..heads import Sum, sum_like
from ..path.blocks import Mapped, MappedGradients, mapped_vjp
from ..types import Parts, SoftmaxPlan


def with_mapped_queries(xp: Namespace, m: Mapped, rows: Chunk, tiles: Iterable[Any]) -> Iterator[Any]:
    """The tiles of a block of queries with the q and k whose products are their logits."""
    I, n, q = rows.start // m.C, rows.stop - rows.start, None
    for tile in tiles:
        if q is None:
            E = m.start[1][..., I, :n, :n]
            own = xp.concat([xp.broadcast_to(tile.q, (*E.shape[:-1], tile.q.shape[-1])), -E], axis=-1)
            columns = xp.matrix_transpose(m.end[1][..., I, :n, :n])
            yield tile._replace(q=own, k=xp.concat([tile.k, columns], axis=-1))
            q = m.q[..., I, :n, :]
        elif tile.at is None:
            yield tile._replace(q=q)
        else:
            J = tile.at.start // m.C
            yield tile._replace(q=q, k=m.k[..., J, :, :])
            q = q @ m.R[..., J, :, :]


class PathGradients:
    """Sums of the gradients of the factors of the tiles: the Products of tiles.py, with position maps."""

    def __init__(self, plan: SoftmaxPlan, x: Parts, m: Mapped):
        xp, n, C, K = plan.xp, m.R.shape[-3], m.C, x.k.shape[-1]
        self.xp, self.plan, self.m, self.T = xp, plan, m, x.k.shape[-2]
        blocks = lambda y, *shape: Sum(xp, (*y.shape[:-3], *shape), y)  # noqa: E731
        self.own_q, self.q = (blocks(m.q, n * C, K) for _ in range(2))
        self.own_k, self.k = (blocks(m.k, n * C, K) for _ in range(2))
        self.E, self.X, self.R = blocks(m.q, n * C, C), blocks(m.k, n * C, C), blocks(m.R, n * K, K)
        self.past = None if x.past is None else sum_like(xp, x.past.k)
        self.mapped: list[tuple[int | None, Array, Array]] = []

    def add(self, rows: Chunk, tile: Any, dq: Array, dk: Array) -> None:
        """Those of a tile, without the scale."""
        xp, K, n = self.xp, self.R.shape[-1], rows.stop - rows.start
        if tile.at == rows:
            self.own_q.add(rows.start, dq[..., :K])
            self.own_k.add(rows.start, dk[..., :K])
            none = xp.zeros((*dq.shape[:-1], self.m.C - n), dtype=dq.dtype, device=device(dq))
            self.E.add(rows.start, xp.concat([-dq[..., K:], none], axis=-1))
            columns = xp.matrix_transpose(sum_to(xp, dk[..., K:], (*self.m.k.shape[:-3], n, n)))
            none = xp.zeros((*columns.shape[:-1], self.m.C - n), dtype=dq.dtype, device=device(dq))
            self.X.add(rows.start, xp.concat([columns, none], axis=-1))
            self.mapped = []
            return
        if tile.at is None and self.past is not None:
            self.past.add(0, dk)
        elif tile.at is not None:
            self.k.add(tile.at.start, dk)
        self.mapped.append((None if tile.at is None else tile.at.start // self.m.C, tile.q, dq))

    def end_rows(self, rows: Chunk) -> None:
        """All tiles of a block of queries are added."""
        d, T = None, self.xp.matrix_transpose
        for J, q, dq in reversed(self.mapped):
            if d is not None and J is not None:
                self.R.add(J * self.R.shape[-1], T(q) @ d)
                dq = dq + d @ T(self.m.R[..., J, :, :])
            d = dq
        if d is not None:
            self.q.add(rows.start, d)

    def done(self) -> tuple[dict[str, Array], Array | None]:
        """(gradients of the sequence, of the keys of the cache)."""
        n = self.m.R.shape[-3]
        each = [self.xp.reshape(y.total, (*y.shape[:-2], n, y.shape[-2] // n, y.shape[-1]))
                for y in (self.own_q, self.own_k, self.E, self.X, self.q, self.k, self.R)]  # fmt: skip
        d = mapped_vjp(self.xp, self.m, MappedGradients(*each), self.T)
        d["q"] = self.plan.scale * d["q"]
        return d, None if self.past is None else self.past.total
