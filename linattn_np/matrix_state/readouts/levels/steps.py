"""Spans of one length, token by token: the levels are a batch axis of calls of one token.

S_l <- M_t S_l,  and S_0 <- M_t S_0 + k_t^T v_t          the core's step, level 0 with the value, the others with 0
out_t = sum_l lam_t[l] q_t S_l
S_n <- sum_{l <= n} S_l,  S_l <- 0 for l < n             n = 1 + trailing zero bits of t + 1
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ....runtime.arrays import Array, cast
from ....runtime.shapes import Sequence
from ... import core
from ...types import Inputs
from .blocks import level_of
from .rows import Gradients, Row


class Saved(NamedTuple):
    """Residuals: of every token its reads (levels, N, H, V) and those of the core."""

    row: Row
    tokens: list[tuple[Any, Any]]


def forward(row: Row) -> tuple[Any, Array, Saved]:
    """(out or None, final S, residuals) of spans of one length."""
    xp, n, outs, tokens = row.plan.xp, row.levels, list[Array](), []
    x = _by_span(row)
    own = row.mask((np.arange(n + 1) == 0)[:, None, None, None, None])
    S = row.zeros(row.state_shape) if row.S is None else row.S
    S = _with_level_0(row, xp.permute_dims(S, (2, 0, 1, 3, 4)))
    for t in range(x.v.shape[1]):
        now = x.each(lambda y, t=t: xp.broadcast_to(y[None, :, t : t + 1, ...], (n + 1, y.shape[0], 1, *y.shape[2:])))
        now = now._replace(v=xp.where(own, now.v, row.zeros(())))
        y, S, saved = row.run(now.core, (Sequence(None, 0, 1),), S, True)
        if y is not None:
            y = y[:n, :, 0, ...]
            outs.append(xp.sum(_weights(row, x.lam, t) * y, axis=0))
        tokens.append((y, saved))
        S = _merged(row, S, t)
    S = xp.permute_dims(S[1:, ...], (1, 2, 0, 3, 4))
    out = None if x.q is None else row.zeros(x.v.shape)
    if outs:
        out = xp.stack(outs, axis=1)
    return None if out is None else xp.reshape(out, row.x.v.shape), S, Saved(row, tokens)


def backward(saved: Saved, dout: Any, dS: Any) -> Gradients:
    """Gradients of the row's arrays."""
    row, tokens = saved
    xp, N, d = row.plan.xp, len(row.spans), Gradients()
    x, each, dlams = _by_span(row), list[Inputs](), list[Array]()
    if dout is not None:
        dout = xp.reshape(dout, (N, len(tokens), *dout.shape[1:]))
    dS = row.zeros(row.state_shape) if dS is None else dS
    dS = _with_level_0(row, xp.permute_dims(dS, (2, 0, 1, 3, 4)))
    for t, (y, residuals) in reversed([*enumerate(tokens)]):
        dS, dy = _merged_vjp(row, dS, t), None
        if dout is not None and y is not None:
            now = dout[:, t, ...]
            dlams.append(xp.permute_dims(xp.sum(y * now, axis=-1), (1, 2, 0)))
            dy = _with_last(row, _weights(row, x.lam, t) * now)[:, :, None, ...]
        dx, dS = core.backward(residuals, dy, dS)
        dx = Inputs(*(None if e is None else e[..., 0, :, :] for e in dx))  # (levels + 1, N, heads, D)
        summed = Inputs(*(None if e is None else xp.sum(e, axis=0) for e in dx))
        each.append(summed._replace(v=dx.v[0, ...]))
    together = Inputs(*(None if e[0] is None else _in_row(row, e) for e in zip(*each, strict=True))) if each else None
    if together is not None:
        d.add(v=together.v)
        d.add_core(together)
        if dlams:
            d.add(q=together.q, lam=_in_row(row, dlams))
    d.add(S=xp.permute_dims(dS[1:, ...], (1, 2, 0, 3, 4)))
    return d


def _by_span(row: Row) -> Any:
    """The row's arrays (N, L, heads, D)."""
    N, xp = max(len(row.spans), 1), row.plan.xp
    return row.x.each(lambda y: xp.reshape(y, (N, y.shape[0] // N, *y.shape[1:])))


def _in_row(row: Row, each: Any) -> Array:
    """Gradients (N, heads, D) of the tokens, last one first, as (tokens, heads, D)."""
    xp = row.plan.xp
    d = xp.stack(each[::-1], axis=1)
    return xp.reshape(d, (d.shape[0] * d.shape[1], *d.shape[2:]))


def _with_level_0(row: Row, S: Array) -> Array:
    return row.plan.xp.concat([row.zeros((1, *S.shape[1:])), S], axis=0)


def _with_last(row: Row, dy: Array) -> Array:
    return row.plan.xp.concat([dy, row.zeros((1, *dy.shape[1:]))], axis=0)


def _weights(row: Row, lam: Array, t: int) -> Array:
    """lam of a token as (levels, N, H, 1)."""
    return cast(row.plan.xp, row.plan.xp.permute_dims(lam[:, t, ...], (2, 0, 1)), row.plan.dtype)[..., None]


def _merges(row: Row, t: int) -> Any:
    """(3, levels + 1, N, 1, 1, 1): the levels below, at and above the one that levels merge into after token t."""
    after = np.array([s.first + t + 1 for s in row.spans], np.int64)
    into, levels = level_of(after, after - 1), np.arange(row.levels + 1)[:, None]  # 1 + trailing zeros of `after`
    return row.mask(np.stack([levels < into, levels == into, levels > into])[..., None, None, None])


def _merged(row: Row, S: Array, t: int) -> Array:
    """S_m <- sum over l <= m of S_l, S_l <- 0 for l < m: (levels + 1, N, H, K, V)."""
    xp, masks, zero = row.plan.xp, _merges(row, t), row.zeros(())
    total = xp.sum(xp.where(masks[2, ...], zero, S), axis=0)
    return xp.where(masks[1, ...], total, xp.where(masks[2, ...], S, zero))


def _merged_vjp(row: Row, dS: Array, t: int) -> Array:
    """The transpose of _merged."""
    xp, masks, zero = row.plan.xp, _merges(row, t), row.zeros(())
    return xp.where(masks[2, ...], dS, xp.sum(xp.where(masks[1, ...], dS, zero), axis=0))
