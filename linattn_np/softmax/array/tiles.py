"""Tiles: a block of queries against one block of keys after the other, nearest first; memory grows with T.

    m' = max(m, max_j z_ij),   e_ij = e^{z_ij - m'},   l' = e^{m - m'} l + sum_j e_ij,   a' = e^{m - m'} a + e V

out = a / l and log l + m after the last tile. Backward recomputes p_ij = e^{z_ij - log_i}, tile by tile
(`definition.py` has the equations). The log decay between i and j of different blocks is the sum of three: from the
start of i's block to i, of the blocks between, from j to the end of its block.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from ...runtime.arrays import Array, Namespace, device, lower_ones, sum_to
from ...runtime.shapes import Chunk, Sequence, chunks
from ..heads import Sum, sum_like
from ..path.blocks import Mapped, mapped
from ..policy import array_tile
from ..types import Parts, Past, SoftmaxPlan
from .path_tiles import PathGradients, with_mapped_queries

LOW = -float("inf")


class Tile(NamedTuple):
    """Queries and keys of one tile, and the terms added to its logits."""

    at: Chunk | None  # None: the cache
    q: Array
    k: Array
    v: Array
    bias: Array  # broadcastable to the logits, None without gates
    hidden: Array  # the pairs that are not read, None: all are


def blocks(plan: SoftmaxPlan, x: Parts, queries: bool) -> list[Chunk]:
    """The blocks of tokens."""
    return chunks(Sequence(None, 0, (x.q if queries else x.k).shape[-2]), array_tile(plan.chunk_size))


def _pair_sums(xp: Namespace, g: Array) -> Array:
    """sum_{j < s <= i} g_s on and below the diagonal: (..., C) to (..., C, C), each by adding its own terms."""
    C = g.shape[-1]
    mask = lower_ones(xp, C, xp.bool, device(g), strict=True)
    rows = xp.broadcast_to(g[..., :, None], (*g.shape, C))
    return xp.cumulative_sum(xp.where(mask, rows, xp.zeros_like(rows)), axis=-2)


def _to_end(xp: Namespace, g: Array) -> Array:
    """sum_{s > j} g_s: (..., C)."""
    shifted = xp.concat([g[..., 1:], xp.zeros_like(g[..., :1])], axis=-1)
    return xp.flip(xp.cumulative_sum(xp.flip(shifted, axis=-1), axis=-1), axis=-1)


def _as_read(xp: Namespace, rows: Chunk, x: Parts, sums: Array) -> Array:
    """Sums (..., C, n) of log decays up to g_i without g_i: common to all keys of a strict row, it cancels.

    A reset, g_i = -inf, stays.
    """
    g = x.g[..., rows.start : rows.stop, None]
    before = xp.concat([xp.zeros_like(sums[..., :1, :]), sums[..., :-1, :]], axis=-2)
    return before + xp.where(xp.isfinite(g), xp.zeros_like(g), g)


def tiles_of(plan: SoftmaxPlan, x: Parts, rows: Chunk, keys: list[Chunk], maps: Mapped | None = None) -> Any:
    """The tiles that a block of queries reads, nearest first."""
    found = _unmapped(plan, x, rows, keys)
    return found if maps is None else with_mapped_queries(plan.xp, maps, rows, found)


def _unmapped(plan: SoftmaxPlan, x: Parts, rows: Chunk, keys: list[Chunk]) -> Any:
    """The tiles without position maps."""
    xp, between, q = plan.xp, None, x.q[..., rows.start : rows.stop, :]
    start, read = None, (lambda sums: sums) if not (plan.strict and plan.normalize) else partial(_as_read, xp, rows, x)
    if x.g is not None:
        start = read(xp.cumulative_sum(x.g[..., rows.start : rows.stop], axis=-1)[..., None])
    for block in reversed(keys):
        if plan.causal and block.start >= rows.stop:
            continue
        if plan.window is not None and block.stop <= rows.start - plan.window + 1:
            return
        k, v = (y[..., block.start : block.stop, :] for y in (x.k, x.v))
        bias = None
        if x.g is not None:
            g = x.g[..., block.start : block.stop]
            if block == rows:
                bias = read(_pair_sums(xp, g))
            else:
                to_end = _to_end(xp, g)[..., None, :]
                bias = start + (to_end if between is None else to_end + between)
                total = xp.sum(g, axis=-1)[..., None, None]
                between = total if between is None else between + total
        if x.bias is not None:
            own = x.bias[..., rows.start : rows.stop, block.start : block.stop]
            bias = own if bias is None else bias + own
        yield Tile(block, q, k, v, bias, _hidden(plan, x, rows, block))
    if x.past is not None:
        bias = None
        if x.past.b is not None:
            bias = start + (x.past.b[..., None, :] if between is None else x.past.b[..., None, :] + between)
        yield Tile(None, q, x.past.k, x.past.v, bias, _hidden_past(plan, x.past, rows))


def _hidden(plan: SoftmaxPlan, x: Parts, rows: Chunk, block: Chunk) -> Array | None:
    """The pairs of a tile that are not read; None if all are."""
    is_inside = plan.window is None or rows.stop - block.start <= plan.window
    if not plan.causal or (block.stop <= rows.start and is_inside):
        return None
    xp, where = plan.xp, device(x.v)
    age = xp.arange(rows.start, rows.stop, device=where)[:, None] - xp.arange(block.start, block.stop, device=where)
    early = age < int(plan.strict)
    return early if plan.window is None else early | (age >= plan.window)


def _hidden_past(plan: SoftmaxPlan, past: Past, rows: Chunk) -> Array:
    hidden = past.age < 0
    if plan.window is None:
        return hidden
    i = plan.xp.arange(rows.start, rows.stop, device=device(past.v))[:, None]
    return hidden | (past.age + i + 1 >= plan.window)


def logits(plan: SoftmaxPlan, tile: Tile) -> Array:
    """z of a tile."""
    xp = plan.xp
    z = tile.q @ xp.matrix_transpose(tile.k)
    if tile.bias is not None:
        z = z + tile.bias
    return z if tile.hidden is None else xp.where(tile.hidden, xp.asarray(LOW, dtype=z.dtype, device=device(z)), z)


def forward(plan: SoftmaxPlan, x: Parts) -> tuple[Array, Array]:
    """(out (..., G, R, T, V), the logs of the sums (..., G, R, T, 1))."""
    keys, maps, found = blocks(plan, x, False), _maps(plan, x), []
    for rows in blocks(plan, x, True):
        found.append(_rows(plan, x, rows, tiles_of(plan, x, rows, keys, maps)))
    outs, logs = zip(*found, strict=True)
    return plan.xp.concat(outs, axis=-2), plan.xp.concat(logs, axis=-2)


def _maps(plan: SoftmaxPlan, x: Parts) -> Mapped | None:
    """The blocks of position maps; None without."""
    return None if x.w is None else mapped(plan.xp, x, array_tile(plan.chunk_size))


def _rows(plan: SoftmaxPlan, x: Parts, rows: Chunk, tiles: Any) -> tuple[Array, Array]:
    """out and the logs of the sums of a block of queries."""
    xp, q = plan.xp, x.q[..., rows.start : rows.stop, :]
    m, total, out = begin(plan, x, q)
    for tile in tiles:
        m, total, faded, e = weights(xp, m, total, logits(plan, tile))
        out = faded * out + e @ tile.v
    factor, log = normalised(plan, m, total)
    return out * factor if not plan.normalize else out / factor, log


def weights(xp: Namespace, m: Array, total: Array, z: Array) -> tuple[Array, Array, Array, Array]:
    """(m', l', e^{m - m'}, e^{z - m'}) with the logits z of more keys."""
    most = xp.maximum(m, xp.max(z, axis=-1, keepdims=True))
    shift = xp.where(most == LOW, xp.zeros_like(most), most)
    e, faded = xp.exp(z - shift), xp.exp(m - shift)
    return most, faded * total + xp.sum(e, axis=-1, keepdims=True), faded, e


def normalised(plan: SoftmaxPlan, m: Array, total: Array) -> tuple[Array, Array]:
    """(l, m + log l), of rows without keys (1, inf); without normaliser (e^m, 0), to be multiplied by."""
    xp, none = plan.xp, m == LOW
    m = xp.where(none, xp.zeros_like(m), m)
    if not plan.normalize:
        return xp.exp(m), xp.zeros_like(m)
    log = m + xp.log(xp.where(none, xp.full_like(total, -LOW), total))
    return xp.where(none, xp.ones_like(total), total), log


def begin(plan: SoftmaxPlan, x: Parts, q: Array) -> tuple[Array, Array, Array]:
    """(m, l, a) of the sink, before the first tile."""
    xp, where = plan.xp, device(x.v)
    zero = xp.zeros((*q.shape[:-3], max(q.shape[-3], x.k.shape[-3]), q.shape[-2], 1), dtype=plan.dtype, device=where)
    shape = (*zero.shape[:-3], max(zero.shape[-3], x.v.shape[-3]), q.shape[-2], x.v.shape[-1])
    out = xp.zeros(shape, dtype=plan.dtype, device=where)
    if x.sinks is None or not plan.normalize:
        return zero + LOW, zero, out
    return zero + x.sinks, zero + 1, out


class Products:
    """The sums of the gradients of q and k."""

    def __init__(self, plan: SoftmaxPlan, x: Parts):
        self.plan, self.q, self.k = plan, sum_like(plan.xp, x.q), sum_like(plan.xp, x.k)
        self.past = None if x.past is None else plan.xp.zeros_like(x.past.k)

    def add(self, rows: Chunk, tile: Tile, dq: Array, dk: Array) -> None:
        """Those of a tile, without the scale."""
        self.q.add(rows.start, self.plan.scale * dq)
        if tile.at is not None:
            self.k.add(tile.at.start, dk)
        elif self.past is not None:
            self.past = self.past + sum_to(self.plan.xp, dk, self.past.shape)

    def end_rows(self, rows: Chunk) -> None:
        """All tiles of a block of queries are added."""

    def done(self) -> tuple[dict[str, Array], Array | None]:
        """(gradients of the sequence, of the keys of the cache)."""
        return {"q": self.q.total, "k": self.k.total}, self.past


class TileGradients:
    """The sums of a backward pass."""

    def __init__(self, plan: SoftmaxPlan, x: Parts, dout: Array, maps: Mapped | None = None):
        self.plan, self.x, xp = plan, x, plan.xp
        self.products = Products(plan, x) if maps is None else PathGradients(plan, x, maps)
        self.v = sum_like(xp, x.v)
        self.sinks: Any = None if x.sinks is None else xp.zeros_like(x.sinks)
        self.past_v = None if x.past is None else xp.zeros_like(x.past.v)
        self.past_b: Any = 0.0
        self.bias = None if x.bias is None else sum_like(xp, x.bias)
        heads = max(x.q.shape[-3], x.k.shape[-3], 1 if x.g is None else x.g.shape[-2])
        shape = (*dout.shape[:-3], heads, x.k.shape[-2], 1)
        # of the logits of pairs of different blocks: sums of rows and of columns, and of all that cross a block
        gated = x.g is not None
        self.readers, self.writers, self.crossing = (Sum(xp, shape if gated else (), dout) for _ in range(3))

    def add(self, rows: Chunk, tile: Tile, p: Array, d: Array, mean: Array | None) -> Array | None:
        """A tile; mean: dout_i . out_i. Returns the total of a tile of pairs of different blocks."""
        xp, T = self.plan.xp, self.plan.xp.matrix_transpose
        dp = d @ T(tile.v)
        dz = sum_to(xp, p * (dp if mean is None else dp - mean), p.shape)
        dv = T(p) @ d
        self.products.add(rows, tile, dz @ tile.k, T(dz) @ tile.q)
        if tile.at is not None:
            self.v.add(tile.at.start, dv)
        elif self.past_v is not None:
            self.past_v = self.past_v + sum_to(xp, dv, self.past_v.shape)
        if self.bias is not None and tile.at is not None:
            self.bias.add_columns(rows.start, tile.at.start, dz)
        if self.x.g is None:
            return None
        if tile.at == rows:
            self.crossing.add(rows.start, _crossing(xp, dz))
            return None
        columns = xp.sum(dz, axis=-2)
        self.readers.add(rows.start, xp.sum(dz, axis=-1, keepdims=True))
        if tile.at is None:
            self.past_b = self.past_b + columns
        else:
            self.writers.add(tile.at.start, columns[..., None])
        return xp.sum(columns, axis=-1)[..., None, None]

    def cross(self, totals: list[tuple[Chunk | None, Array]]) -> None:
        """Pairs of a block of queries with earlier keys cross the blocks between."""
        between = None
        for at, total in reversed(totals):
            if at is not None and between is not None:
                n = at.stop - at.start
                self.crossing.add(at.start, self.plan.xp.broadcast_to(between, (*between.shape[:-2], n, 1)))
            between = total if between is None else between + total

    def done(self) -> Parts:
        """All gradients."""
        x, past, g, (products, past_k) = self.x, None, None, self.products.done()
        if x.past is not None:
            b = None if x.past.b is None else sum_to(self.plan.xp, self.past_b, x.past.b.shape)
            past = Past(past_k, self.past_v, b, None)
        if x.g is not None:
            g = sum_to(self.plan.xp, self._gates(), x.g.shape)
        bias = None if self.bias is None else self.bias.total
        return Parts(v=self.v.total, g=g, sinks=self.sinks, past=past, bias=bias, **products)

    def _gates(self) -> Array:
        """dg_s = sum_{i >= s} of the rows + sum_{j < s} of the columns of its block, and the terms that cross it."""
        xp, found = self.plan.xp, []
        for a, b in blocks(self.plan, self.x, False):
            rows, columns, crossing = (y.total[..., a:b, 0] for y in (self.readers, self.writers, self.crossing))
            later = xp.flip(xp.cumulative_sum(xp.flip(rows, axis=-1), axis=-1), axis=-1)
            sums = xp.cumulative_sum(columns, axis=-1)
            earlier = xp.concat([xp.zeros_like(sums[..., :1]), sums[..., :-1]], axis=-1)
            found.append(later + earlier + crossing)
        return xp.concat(found, axis=-1)


def _crossing(xp: Namespace, dz: Array) -> Array:
    """sum over i >= s > j of dz_ij: (..., C, C) to (..., C, 1)."""
    C, where = dz.shape[-1], device(dz)
    later = xp.matrix_transpose(lower_ones(xp, C, dz.dtype, where)) @ dz
    return xp.sum(later * lower_ones(xp, C, dz.dtype, where, strict=True), axis=-1, keepdims=True)


def backward(plan: SoftmaxPlan, x: Parts, out: Array, logs: Array, dout: Array, dlse: Array | None = None) -> Parts:
    """Gradients of the sequence and of the cache."""
    xp, keys, maps = plan.xp, blocks(plan, x, False), _maps(plan, x)
    sums = TileGradients(plan, x, dout, maps)
    for rows in blocks(plan, x, True):
        log, d, o = (y[..., rows.start : rows.stop, :] for y in (logs, dout, out))
        mean = xp.sum(d * o, axis=-1, keepdims=True) if plan.normalize else None
        mean = mean if dlse is None else mean - dlse[..., rows.start : rows.stop, :]
        totals = []
        for tile in tiles_of(plan, x, rows, keys, maps):
            total = sums.add(rows, tile, xp.exp(logits(plan, tile) - log), d, mean)
            if total is not None:
                totals.append((tile.at, total))
        sums.products.end_rows(rows)
        sums.cross(totals)
        if x.sinks is not None and mean is not None:
            sums.sinks = sums.sinks - sum_to(xp, xp.exp(x.sinks - log) * mean, x.sinks.shape)
    return sums.done()
