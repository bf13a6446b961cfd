"""A running maximum in log space, m_t = max(a_t + m_{t-1}, b_t): it stabilises exponential gates to <= 1.

The stored state is e^{-m_t} times the represented one, so that a log decay a_t becomes a_t + m_{t-1} - m_t and a
log input gate b_t becomes b_t - m_t. The result does not depend on m, if both use the same m.
Arrays are (..., T, H), m_0 (..., H), or (N, H) for N sequences in one row.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import NamedTuple

from ..runtime.arrays import Array, Namespace, cast, device, is_cupy
from ..runtime.shapes import Sequence, segments
from .host import numpy_kernels


class Gauge(NamedTuple):
    """Log gates, the stabiliser m, and the stabilised gates."""

    a: Array
    b: Array
    m_0: Array
    m: Array
    decay: Array  # a_t + m_{t-1} - m_t <= 0, up to the rounding of the last m; this one and the next in the dtype
    write: Array  # e^{b_t - m_t} <= 1
    least: Array  # e^{-m_t}


def gauge(
    xp: Namespace, a: Array, b: Array, m_0: Array, sequences: Items[Sequence], dtype: object,
    positions: Items[int] | None = (),
) -> Gauge:  # fmt: skip
    """The gauge of every sequence; m of its last token and at positions is rounded to `dtype`, the dtype of a state.

    positions: tokens before them; None: m of every token is rounded.

    a and b have the dtype of sums; decay, write and least are rounded to `dtype`. Of NumPy and CuPy arrays by a kernel.
    If m_t = a_t + m_{t-1}, the stabilised log decay is exactly 0 and the state is multiplied by 1.
    """
    if is_cupy(xp):
        from .cuda import stabiliser as kernel

        if kernel.takes(a, sequences, dtype, positions):
            return Gauge(a, b, m_0, *kernel.gauge(xp, a, b, m_0, sequences))
    elif numpy_kernels(xp, a, b, m_0) is not None:
        from .cpu import stabiliser

        ends = (
            None
            if positions is None
            else tuple(sorted({*(s.stop - 1 for s in sequences), *(p - 1 for p in positions)}))
        )
        return Gauge(a, b, m_0, *stabiliser.accumulated(a, b, m_0, sequences, dtype, ends))
    m_0 = cast(xp, m_0, a.dtype)
    maxima, earlier = [], []
    for s in sequences:
        t, begin = slice(s.start, s.stop), row(m_0, s)
        m = running_maximum(xp, a[..., t, :], b[..., t, :], begin)
        m = xp.concat([m[..., :-1, :], cast(xp, cast(xp, m[..., -1:, :], dtype), m.dtype)], axis=-2)
        if positions is None:
            m = cast(xp, cast(xp, m, dtype), m.dtype)
        elif own := [p - s.start - 1 for p in positions if s.start < p < s.stop]:
            is_at = xp.any(xp.arange(s.stop - s.start, device=device(m))[:, None]
                           == xp.asarray(own, device=device(m))[None, :], axis=-1)  # fmt: skip
            m = xp.where(is_at[:, None], cast(xp, cast(xp, m, dtype), m.dtype), m)
        maxima.append(m)
        earlier.append(delayed(xp, m, begin))
    m = joined(xp, maxima)
    gates = a + (joined(xp, earlier) - m), xp.exp(b - m), xp.exp(-m)
    return Gauge(a, b, m_0, m, *(cast(xp, y, dtype) for y in gates))


def last(xp: Namespace, at: Gauge, sequences: Items[Sequence]) -> Array:
    """m after the last token of every sequence; m_0 of an empty one."""
    return rows(xp, at.m_0, _after(at, sequences), sequences)


def _after(at: Gauge, sequences: Items[Sequence]) -> list[Array]:
    """m after the last token of each sequence or prefix."""
    return [at.m[..., s.stop - 1, :] if s.stop > s.start else row(at.m_0, s) for s in sequences]


def last_of_each(xp: Namespace, at: Gauge, prefixes: Items[Sequence]) -> Array:
    """m after each prefix: (..., n, H), ragged (n, H)."""
    if not prefixes:
        return at.m_0[..., None, :][..., :0, :] if at.m_0.ndim == at.m.ndim - 1 else at.m_0[:0, ...]
    if prefixes[0].row is None:
        return xp.stack(_after(at, prefixes), axis=-2)
    return rows(xp, at.m_0, _after(at, prefixes), prefixes)


def last_vjp(xp: Namespace, at: Gauge, sequences: Items[Sequence], dm: Array) -> tuple[Array, Array, Array]:
    """(da, db, dm_0) from the gradient dm of `last`."""
    if numpy_kernels(xp, at.a, at.b, at.m, at.m_0, dm) is not None:
        from .cpu import stabiliser_vjp

        return stabiliser_vjp.maximum_vjp(at.a, at.b, at.m, at.m_0, sequences, dm)
    da: list[Array] = []
    db: list[Array] = []
    dm_0: list[Array] = []
    for s in sequences:
        t = slice(s.start, s.stop)
        parts = last_maximum_vjp(xp, at.a[..., t, :], at.b[..., t, :], at.m[..., t, :], row(at.m_0, s), row(dm, s))
        for parts_of, part in zip((da, db, dm_0), parts, strict=True):
            parts_of.append(part)
    return joined(xp, da), joined(xp, db), rows(xp, dm, dm_0, sequences)


def last_of_each_vjp(
    xp: Namespace, at: Gauge, sequences: Items[Sequence], prefixes: Items[Sequence], dm: Array
) -> tuple[Array, Array, Array]:
    """(da, db, dm_0) from the gradient dm of `last_of_each`: from each position to the one before it."""
    da: list[Array] = []
    db: list[Array] = []
    dm_0: list[Array] = []
    for s in sequences:
        begin = row(at.m_0, s)
        given = {p.stop: dm[n, ...] if s.row is not None else dm[..., n, :]
                 for n, p in enumerate(prefixes) if p.row == s.row}  # fmt: skip
        carry, parts = xp.zeros_like(begin), []
        for (_, start, stop), _ in reversed(segments(s, sorted(given))):
            carry = carry + given.get(stop, 0.0) if stop > start else carry
            t, before = slice(start, stop), begin if start == s.start else at.m[..., start - 1, :]
            a, b, carry = last_maximum_vjp(xp, at.a[..., t, :], at.b[..., t, :], at.m[..., t, :], before, carry)
            parts.append((a, b))
        dm_0.append(carry + given.get(s.start, 0.0))
        for parts_of, part in zip((da, db), zip(*reversed(parts), strict=True), strict=True):
            parts_of += part
    return joined(xp, da), joined(xp, db), rows(xp, at.m_0, dm_0, sequences)


def row(m: Array, sequence: Sequence) -> Array:
    """The part of an array of states that belongs to a sequence."""
    return m if sequence.row is None else m[sequence.row, ...]


def rows(xp: Namespace, like: Array, each: list[Array], sequences: Items[Sequence]) -> Array:
    """The transpose of row, for all sequences."""
    if not each or sequences[0].row is None:
        return each[0] if each else like
    return xp.stack([xp.reshape(m, like.shape[1:]) for m in each], axis=0)


def joined(xp: Namespace, parts: list[Array]) -> Array:
    """The concatenated tokens of all sequences."""
    return parts[0] if len(parts) == 1 else xp.concat(parts, axis=-2)


def running_maximum(xp: Namespace, a: Array, b: Array, m: Array) -> Array:
    """m_1 .. m_T of one sequence from m_0.

    Element t is the map m -> max(a_t + m, b_t). Two of them compose to (a_1 + a_2, max(a_2 + b_1, b_2)), so that
    log2 T rounds give all m_t, each a sum without cancellation.
    """
    T, n = b.shape[-2], 1
    if T == 0:
        return b
    b = xp.concat([xp.maximum(a[..., :1, :] + m[..., None, :], b[..., :1, :]), b[..., 1:, :]], axis=-2)
    while n < T:
        b = xp.concat([b[..., :n, :], xp.maximum(a[..., n:, :] + b[..., :-n, :], b[..., n:, :])], axis=-2)
        a = xp.concat([a[..., :n, :], a[..., n:, :] + a[..., :-n, :]], axis=-2)
        n *= 2
    return b


def delayed(xp: Namespace, m: Array, m_0: Array) -> Array:
    """m_{t-1} from m_t."""
    first = xp.broadcast_to(m_0[..., None, :], (*m.shape[:-2], min(m.shape[-2], 1), m.shape[-1]))
    return xp.concat([first, m[..., :-1, :]], axis=-2)


def last_maximum_vjp(xp: Namespace, a: Array, b: Array, m: Array, m_0: Array, dm: Array) -> tuple[Array, Array, Array]:
    """(da, db, dm_0) from the gradient dm (..., H) of m_T: it flows to the b_j, or m_0, that attains the maximum, and
    to a_t for t > j. For equal sides of a maximum, m_{t-1} is taken.
    """
    T = b.shape[-2]
    if T == 0:
        return xp.zeros_like(a), xp.zeros_like(b), dm
    t = xp.arange(T, device=device(b))[:, None]
    is_input = b > a + delayed(xp, m, m_0)  # m_t = b_t
    origin = xp.max(xp.where(is_input, t, -1), axis=-2, keepdims=True)  # the last such t; -1: m_0
    dm, zero = dm[..., None, :], xp.zeros_like(b)
    da, db = xp.where(t > origin, dm, zero), xp.where(t == origin, dm, zero)
    return da, db, xp.where(origin < 0, dm, xp.zeros_like(dm))[..., 0, :]
