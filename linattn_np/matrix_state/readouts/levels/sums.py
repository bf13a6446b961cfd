"""Spans of any length: near levels in chunks, each level above them by blocks, and the ends of their states."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ....runtime.arrays import Array
from . import ends, far, near
from .blocks import blocks
from .rows import Gradients, Row, placed, taken

MOST_NEAR = 6  # c: chunks of at most 64 positions


class Saved(NamedTuple):
    """Residuals: the last near level, and those of each sum that was formed; blocks: the row of far.aligned."""

    row: Row
    c: int
    near: Any
    blocks: tuple[Row, np.ndarray]
    far: dict[int, Any]
    head: Any
    tail: Any


def last_near(row: Row) -> int:
    """c: chunks are no longer than chunk_size, and have no level that lam has not."""
    size = row.plan.chunk_size
    most = size.bit_length() - 1 if isinstance(size, int) else MOST_NEAR
    return min(max(most, 1), MOST_NEAR, row.levels)


def forward(row: Row) -> tuple[Any, Array, Saved]:
    """(out or None, final S, residuals)."""
    xp, c, (N, H, n, K, V) = row.plan.xp, last_near(row), row.state_shape
    outs, above, of_near, of_head, of_tail, of_far = list[Array](), list[Array](), None, None, None, dict[int, Any]()
    low, tokens = row.zeros((N, H, c, K, V)), row.x.v.shape[0]
    if row.x.q is not None and tokens:
        out, of_near = near.forward(row, c)
        outs.append(out)
    if row.S is not None:
        out, low, of_head = ends.head(row, c)
        outs += [] if out is None else [out]
    if row.plan.returns_state or row.plan.gradients or row.x.q is None:
        own, of_tail = ends.tail(row, c)
        low = low + own
    aligned, own_tokens = far.aligned(row, c)
    for level in range(c + 1, n + 1):
        at, end = blocks(level, aligned.spans), row.zeros((N, H, K, V))
        if at.is_needed:
            out, end, of_far[level] = far.forward(aligned, level, at)
            outs += [] if out is None else [taken(row, out, own_tokens)]
        above.append(end)
    out = None if row.x.q is None else sum(outs[1:], outs[0]) if outs else row.zeros(row.x.v.shape)
    S = xp.concat([low, *(end[:, :, None, ...] for end in above)], axis=2)
    return out, S, Saved(row, c, of_near, (aligned, own_tokens), of_far, of_head, of_tail)


def backward(saved: Saved, dout: Any, dS: Any) -> Gradients:
    """Gradients of the row's arrays."""
    row, c, of_near, (aligned, own_tokens), of_far, of_head, of_tail = saved
    d, of_blocks, low = Gradients(), Gradients(), None if dS is None else dS[:, :, :c, ...]
    if of_near is not None and dout is not None:
        near.backward(row, of_near, dout, d)
    if of_head is not None:
        ends.head_vjp(row, c, of_head, dout, low, d)
    if of_tail is not None and low is not None:
        ends.tail_vjp(row, c, of_tail, low, d)
    if dout is not None and of_far:
        dout = placed(row, dout, own_tokens, aligned.x.v.shape[0])
    for level, each in of_far.items():
        far.backward(aligned, level, each, dout, None if dS is None else dS[:, :, level - 1, ...], of_blocks)
    d.add(**{name: y if name == "S" else taken(row, y, own_tokens) for name, y in of_blocks.items()})
    return d
