"""Few long sequences in segments; the kernels compute each as a sequence of its own.

Segment s makes of the state S before it M_s S + A_s, and of the gradient G after it M_s^T G + B_s. A pass from zeros
gives every A_s, one from the last chunk every B_s. M_s is the decay of the segment, with the delta rule the states of a
pass that begins with the identity and has no values. The states before the segments follow from one another.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

from ....runtime.arrays import Array, cast, shared_heads
from ....runtime.cuda import launch
from ... import policy
from ..scan.plan import segments
from . import plan as cuts
from .launch import PortableBatch, run


def cut(xp: Any, batch: PortableBatch) -> PortableBatch | None:
    """The call in segments; None where sequences are many, short, or do not follow one another in memory."""
    N, T, heads = batch.sizes
    if batch.offsets is not None or not all(_is_one_row(y) for n, y in batch.arrays.items() if n != "u"):
        return None
    found = cuts.launch_of("values", batch.kind, launch.shared_limit())
    blocks = N * heads * (1 if found is None else found.parts)
    many = segments(blocks, T, policy.PORTABLE_RESIDENT, launch.multiprocessors())
    if many < policy.PORTABLE_SEGMENTS:
        return None
    each = -(-T // (many * cuts.MARK)) * cuts.MARK
    ends = [n * T + min(t, T) for n in range(N) for t in range(each, T + each, each)]
    offsets = xp.asarray([0, *ends], dtype=xp.int64)
    K, V = batch.kind.K, batch.kind.V
    return replace(batch, shape=(len(ends), heads, K, V), sizes=(len(ends), T, heads), longest=each, offsets=offsets)


def _is_one_row(y: Array | None) -> bool:
    return y is None or y.shape[0] == 1 or y.strides[0] == y.shape[1] * y.strides[1]


def transfers(xp: Any, batch: PortableBatch) -> Array:
    """M of all segments: (segments, heads, K, 1 or V), with the delta rule (segments, heads, K, K)."""
    (many, _, heads), K, arrays = batch.sizes, batch.kind.K, batch.arrays
    if not batch.kind.erase:
        M = _decays(xp, batch, "g").reshape(many, heads, K, 1)
        return M * _decays(xp, batch, "gv").reshape(many, heads, 1, -1) if batch.kind.columns else M
    found = xp.empty((many, heads, K, K), dtype=xp.float32)
    zeros = xp.empty((1, 1, 1, K), dtype=arrays["v"].dtype)
    zeros[...] = 0
    nothing = xp.broadcast_to(zeros, (*arrays["v"].shape[:-1], K))
    start = xp.ascontiguousarray(xp.broadcast_to(xp.eye(K, dtype=xp.float32), found.shape))
    square = replace(batch, kind=batch.kind._replace(V=K), arrays=arrays | {"v": nothing, "out": None, "error": None})
    run("values", square, start=start, end=found)
    return found


def _decays(xp: Any, batch: PortableBatch, name: str) -> Array:
    """The decays of all segments by their log decays."""
    (_, T, heads), g = batch.sizes, cast(xp, batch.arrays[name], xp.float32)
    N, each = prod(batch.lead), batch.longest
    whole = T // each
    sums = xp.sum(g[:, : whole * each].reshape(N, whole, each, *g.shape[-2:]), axis=2)
    if T % each:
        rest = xp.sum(g[:, whole * each :], axis=1)
        sums = xp.concatenate((sums, rest[:, None]), axis=1)
    return xp.exp(shared_heads(xp, sums, heads))


def begins(xp: Any, batch: PortableBatch, M: Array, state: Array | None, back: bool = False) -> Array:
    """States before all segments, or gradients of the states after them."""
    (many, _, heads), K, V = batch.sizes, batch.kind.K, batch.kind.V
    adds = xp.empty(batch.shape, dtype=xp.float32)
    run("values", batch, back, end=adds)
    N = prod(batch.lead)
    adds, M = adds.reshape(N, -1, heads, K, V), M.reshape(N, -1, heads, K, M.shape[-1])
    S = xp.zeros((N, heads, K, V), dtype=xp.float32) if state is None else state.reshape(N, heads, K, V)
    found, order = [], range(many // N)
    for s in reversed(order) if back else order:
        found.append(S)
        if batch.kind.erase:
            S = xp.matmul(xp.swapaxes(M[:, s], -1, -2) if back else M[:, s], S) + adds[:, s]
        else:
            S = M[:, s] * S + adds[:, s]
    return xp.ascontiguousarray(xp.stack(found[::-1] if back else found, axis=1)).reshape(batch.shape)


def outer(batch: PortableBatch, states: Array, last: bool) -> Array:
    """The state of every sequence after its last segment, or (last false) before its first."""
    N = prod(batch.lead)
    return states.reshape(N, -1, *batch.shape[1:])[:, -1 if last else 0]
