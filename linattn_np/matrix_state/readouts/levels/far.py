"""A level l > c: second halves of blocks of 2^l positions read what first halves have written.

    out = the core's output for lam[l] q, 0 in first halves, and v, 0 in second halves, block by block

A block begins with no state, but the first one of a span with that of the level, or, in a first half, with the sum of
all levels below. Tokens of zeros stand before a span that begins inside a chunk of 2^c positions: the core's chunks
begin at multiples of 2^c in its first block too, and a NaN reaches earlier tokens of its own chunk only.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ....runtime.arrays import Array, cast
from ... import core
from .blocks import Blocks, Span
from .rows import Gradients, Row, placed, taken


class Saved(NamedTuple):
    """Residuals: the blocks, and those of the core."""

    at: Blocks
    core: Any


def aligned(row: Row, c: int) -> tuple[Row, np.ndarray]:
    """(the row with tokens of zeros before spans that begin inside a chunk of 2^c, the places of its own tokens)."""
    spans, own, n = list[Span](), [np.zeros(0, np.int64)], 0
    for start, stop, first in row.spans:
        more = first % (1 << c) if stop > start else 0
        own.append(np.arange(n + more, n + more + stop - start))
        spans.append(Span(n, n + more + stop - start, first - more))
        n = spans[-1].stop
    tokens = np.concatenate(own)
    if tokens.size == n:
        return row, tokens
    return row._replace(x=row.x.each(lambda y: placed(row, y, tokens, n)), spans=tuple(spans)), tokens


def forward(row: Row, level: int, at: Blocks) -> tuple[Any, Array, Saved]:
    """(out of this level or None, its state after each span, residuals)."""
    xp, x = row.plan.xp, row.x
    q = None
    if x.q is not None and at.reads.any():
        q = _where(row, at.reads, cast(xp, x.q, row.plan.dtype) * _lam(row, level))
    S = None
    if row.S is not None:
        S = mixed(row, _entering(at, level, row.levels), row.S)[:, :, 0, ...]
        S = placed(row, S, np.array(at.begins), len(at.sequences))
    x = x._replace(q=q, v=_where(row, at.writes, x.v))
    out, end, saved = row.run(x.core, at.sequences, S, any(at.stays))
    if any(at.stays):
        end = _where(row, np.array(at.stays), taken(row, end, np.array(at.ends))[:, None, ...])[:, 0, ...]
    else:
        end = row.zeros((len(row.spans), *row.state_shape[1:2], *row.state_shape[3:]))
    return out, end, Saved(at, saved)


def backward(row: Row, level: int, saved: Saved, dout: Any, dS: Any, d: Gradients) -> None:
    """Adds the gradients; dS: of the level's state after each span."""
    at, residuals = saved
    xp, x, dend = row.plan.xp, row.x, None
    has_reads = dout is not None and x.q is not None and bool(at.reads.any())
    if dS is not None and any(at.stays):
        dS = _where(row, np.array(at.stays), dS[:, None, ...])[:, 0, ...]
        dend = placed(row, dS, np.array(at.ends), len(at.sequences))
    if not has_reads and dend is None:
        return
    dx, dbegin = core.backward(residuals, dout if has_reads else None, dend)
    d.add(v=_where(row, at.writes, dx.v))
    d.add_core(dx)
    if has_reads:
        dq = _where(row, at.reads, dx.q)
        dlam = xp.sum(dq * cast(xp, x.q, row.plan.dtype), axis=-1, keepdims=True)
        d.add(q=dq * _lam(row, level), lam=dlam * row.constant(np.arange(row.levels) == level))
    if row.S is not None:
        dfirst = taken(row, dbegin, np.array(at.begins))[:, :, None, ...]
        d.add(S=mixed(row, np.swapaxes(_entering(at, level, row.levels), -1, -2), dfirst))


def _lam(row: Row, level: int) -> Array:
    return cast(row.plan.xp, row.x.lam[..., level : level + 1], row.plan.dtype)


def _where(row: Row, mask: np.ndarray, y: Array) -> Array:
    """y (n, heads, D...) where the mask (n,) is true, else 0."""
    return row.plan.xp.where(row.mask(mask.reshape(-1, *[1] * (y.ndim - 1))), y, row.zeros(()))


def _entering(at: Blocks, level: int, n: int) -> np.ndarray:
    """(N, 1, n): the levels of an initial state that a span's first block of this level begins with."""
    levels = np.arange(1, n + 1)
    return np.array([levels < level if merges else levels == level for merges in at.merges], np.float64)[:, None]


def mixed(row: Row, table: np.ndarray, S: Array) -> Array:
    """Sums of levels, table (N, new, old): (N, H, old, K, V) -> (N, H, new, K, V)."""
    xp, (N, H, old, K, V) = row.plan.xp, S.shape
    summed = row.constant(table)[:, None, ...] @ xp.reshape(S, (N, H, old, K * V))
    return xp.reshape(summed, (N, H, table.shape[-2], K, V))
