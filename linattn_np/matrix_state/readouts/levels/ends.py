"""Levels 1 .. c of the states before and after a span: columns of one state (K, c V).

    head   tokens up to the first end of a chunk read the initial state:  out_i = sum_m lam_i[max(l, m)] y_i[m]
    tail   tokens after the last begin of a chunk write the final one, each in the columns of its level

l = level(i, p) of the position p of the first token, and y_i[m] is the core's output for the columns of level m,
nothing being written.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Any, NamedTuple

import numpy as np

from ....runtime.arrays import Array, Namespace, cast
from ....runtime.shapes import Sequence
from ... import core
from .blocks import Span, heads_of, level_of, one_hot, positions, tails_of
from .far import mixed
from .rows import Gradients, LevelInputs, Row, in_order, placed, taken, tokens_of


class HeadSaved(NamedTuple):
    """Residuals of a head: its spans, lam by initial level (tokens, H, 1, c), y (tokens, H, c, V), the core's."""

    spans: list[Span]
    weights: Any
    y: Any
    core: Any


class TailSaved(NamedTuple):
    """Residuals of a tail: its spans, and those of the core."""

    spans: list[Span]
    core: Any


def head(row: Row, c: int) -> tuple[Any, Array, HeadSaved]:
    """(out of the initial levels or None, what they leave in the levels 1 .. c of the final state, residuals)."""
    xp, V = row.plan.xp, row.x.v.shape[-1]
    spans = heads_of(row.spans, 1 << c)
    x = _cut(row, spans)
    v = row.zeros((*x.v.shape[:-1], c * V))
    y, end, saved = row.run(x.core._replace(v=v), _sequences(spans), _columns(xp, row.S[:, :, :c, ...]), True)
    low = mixed(row, _moving(row.spans, c), _levels(xp, end, c))
    if x.q is None:
        return None, low, HeadSaved(spans, None, None, saved)
    weights = (cast(xp, x.lam, row.plan.dtype) @ row.constant(_read(spans, c, row.levels)))[..., None, :]
    y = xp.reshape(y, (*y.shape[:-1], c, V))
    out = placed(row, (weights @ y)[..., 0, :], tokens_of(spans), row.x.v.shape[0])
    return out, low, HeadSaved(spans, weights, y, saved)


def head_vjp(row: Row, c: int, saved: HeadSaved, dout: Any, dS: Any, d: Gradients) -> None:
    """Adds the gradients; dS: of the levels 1 .. c of the final state."""
    spans, weights, y, residuals = saved
    xp, at, n, dy, dend = row.plan.xp, tokens_of(spans), row.x.v.shape[0], None, None
    if dout is not None and y is not None:
        dout = taken(row, dout, at)[..., None, :]  # (tokens, H, 1, V)
        dlam = (dout @ xp.matrix_transpose(y))[..., 0, :] @ xp.matrix_transpose(
            row.constant(_read(spans, c, row.levels))
        )
        d.add(lam=placed(row, dlam, at, n))
        dy = xp.matrix_transpose(weights) @ dout
        dy = xp.reshape(dy, (*dy.shape[:-2], c * dy.shape[-1]))
    if dS is not None:
        dend = _columns(xp, mixed(row, np.swapaxes(_moving(row.spans, c), -1, -2), dS))
    if dy is None and dend is None:
        return
    dx, dbegin = core.backward(residuals, dy, dend)
    if dy is not None:
        d.add(q=placed(row, dx.q, at, n))
    d.add_core(dx, lambda y: placed(row, y, at, n))
    dlow = _levels(xp, dbegin, c)
    rest = row.zeros((*dlow.shape[:2], row.levels - c, *dlow.shape[3:]))
    d.add(S=xp.concat([dlow, rest], axis=2))


def tail(row: Row, c: int) -> tuple[Array, TailSaved]:
    """(the tokens of the levels 1 .. c of the final state, residuals)."""
    xp, spans = row.plan.xp, tails_of(row.spans, 1 << c)
    x = _cut(row, spans)
    v = xp.where(row.mask(_written(spans, c)), x.v[..., None, :], row.zeros(()))
    v = xp.reshape(v, (*x.v.shape[:-1], c * x.v.shape[-1]))
    _, end, saved = row.run(x.core._replace(q=None, v=v), _sequences(spans), None, True)
    return _levels(xp, end, c), TailSaved(spans, saved)


def tail_vjp(row: Row, c: int, saved: TailSaved, dS: Array, d: Gradients) -> None:
    """Adds the gradients; dS: of the levels 1 .. c of the final state."""
    spans, residuals = saved
    xp, at, n = row.plan.xp, tokens_of(spans), row.x.v.shape[0]
    dx, _ = core.backward(residuals, None, _columns(xp, dS))
    dv = xp.reshape(dx.v, (*dx.v.shape[:-1], c, row.x.v.shape[-1]))
    dv = xp.sum(xp.where(row.mask(_written(spans, c)), dv, row.zeros(())), axis=-2)
    d.add(v=placed(row, dv, at, n))
    d.add_core(dx, lambda y: placed(row, y, at, n))


def _read(spans: Items[Span], c: int, n: int) -> np.ndarray:
    """(tokens, n, c): 1 where the token reads level m of the initial state with lam[l], l = max(level(i, p), m)."""
    first = np.repeat([s.first for s in spans], [s.stop - s.start for s in spans]).astype(np.int64)
    return one_hot(np.maximum(level_of(positions(spans), first)[:, None], np.arange(1, c + 1)), n)


def _moving(spans: Items[Span], c: int) -> np.ndarray:
    """(N, c, c): 1 where level m of the state before a span is in level l <= c of the one after it."""
    before, after = (np.array(p, np.int64) for p in ([s.first for s in spans], [s.last for s in spans]))
    return one_hot(np.maximum(level_of(before, after)[:, None], np.arange(1, c + 1)) - 1, c)


def _written(spans: Items[Span], c: int) -> np.ndarray:
    """(tokens, 1, c, 1): whether a token is in level l of the final state."""
    last = np.repeat([s.last for s in spans], [s.stop - s.start for s in spans]).astype(np.int64)
    return (level_of(positions(spans), last)[:, None] == np.arange(1, c + 1))[:, None, :, None]


def _columns(xp: Namespace, S: Array) -> Array:
    """(N, H, c, K, V) as (N, H, K, c V)."""
    N, H, c, K, V = S.shape
    return xp.reshape(xp.permute_dims(S, (0, 1, 3, 2, 4)), (N, H, K, c * V))


def _levels(xp: Namespace, S: Array, c: int) -> Array:
    """The inverse of _columns."""
    N, H, K, width = S.shape
    return xp.permute_dims(xp.reshape(S, (N, H, K, c, width // c)), (0, 1, 3, 2, 4))


def _cut(row: Row, spans: Items[Span]) -> LevelInputs:
    """The tokens of the spans."""
    at = tokens_of(spans)
    return row.x.each(lambda y: taken(row, y, at))


def _sequences(spans: Items[Span]) -> tuple[Sequence, ...]:
    return tuple(Sequence(n, s.start, s.stop) for n, s in enumerate(in_order(spans)))
