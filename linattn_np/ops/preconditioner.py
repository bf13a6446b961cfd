"""Keys behind a diagonal preconditioner: a decaying sum of squares of each channel, and a bounded factor of it.

    A_t = e^{a_t} A_{t-1} + b_t k_t * k_t
    m_t = span^{-softsign(r_t)},   r_t = log(A_t + eps) - center,   softsign(r) = r / (1 + |r|)
    w_t = m_t * k_t

With c_t the gradient of A_t and s_t = log(span) m_t / (1 + |r_t|)^2 = dm_t / dcenter,

    c_t = e^{a_{t+1}} c_{t+1} - dw_t * k_t * s_t / (A_t + eps)
    dk_t = dw_t * m_t + 2 b_t k_t * c_t,   db_t = <k_t * k_t, c_t>,   da_t = e^{a_t} <A_{t-1}, c_t>
    dcenter = sum_t <dw_t, k_t * s_t>,     dA_0 = e^{a_1} c_1

Arrays are (..., T, heads, K), numbers of tokens (..., T, H), sums (..., H, K). Of NumPy and CuPy arrays each direction
is one pass (cpu/preconditioner.py, cuda/preconditioner.py).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from ..runtime.arrays import Array, Namespace, as_computed, cast, device, is_cupy, shared_heads
from ..runtime.shapes import Sequence
from .associative import affine, prefixes
from .host import numpy_kernels
from .stabiliser import row, rows
from .sums import over_tokens, sum_of_groups


class Keys(NamedTuple):
    """Keys (..., T, Hk, K), the log decays a and the weights b (..., T, H) of their squares, and the center (H,)."""

    k: Array
    a: Array
    b: Array
    center: Array


class Bounds(NamedTuple):
    """How keys are preconditioned: the library, sequences, span, eps, and the dtype of the computation."""

    xp: Namespace
    sequences: tuple[Sequence, ...]
    span: float
    eps: float
    dtype: Any


def preconditioned(how: Bounds, x: Keys, begin: Array | None, stored: Any = None) -> tuple[Array, Array]:
    """(w, A after the last token of each sequence); begin: A before the first one, None: 0.

    stored: the dtype of w; None: that of the computation.
    """
    stored = how.dtype if stored is None else stored
    if (cpu := _kernels(how, x, begin)) is not None:
        w, end = cpu.preconditioned(how, x, begin)
        return cast(how.xp, w, stored), end
    if (cuda := _cuda_kernels(how, x, begin)) is not None:
        return cuda.preconditioned(how, x, begin, stored)
    x, begin = _computed(how, x, begin)
    A, k = _sums(how, x, begin), _wide(how, x)
    each = [A[..., s.stop - 1, :, :] if s.stop > s.start else row(begin, s) for s in how.sequences]
    return cast(how.xp, k * _factor(how, x, A)[0], stored), rows(how.xp, begin, each, how.sequences)


def preconditioned_vjp(
    how: Bounds, x: Keys, begin: Array | None, dw: Array | None, dend: Array | None
) -> tuple[Keys, Array]:
    """(gradients of the keys, dA_0) from those of w and of the last A; None: 0."""
    if (cpu := _kernels(how, x, begin, dw, dend)) is not None:
        return cpu.preconditioned_vjp(how, x, begin, dw, dend)
    if (cuda := _cuda_kernels(how, x, begin, dw, dend)) is not None:
        d, dbegin = cuda.preconditioned_vjp(how, x, begin, dw, dend)
        return d._replace(k=sum_of_groups(how.xp, d.k, x.k.shape[-2])), dbegin
    xp, (x, begin) = how.xp, _computed(how, x, begin)
    A, k, b = _sums(how, x, begin), _wide(how, x), x.b[..., None]
    m, slope = _factor(how, x, A)
    dw = xp.zeros_like(A) if dw is None else as_computed(xp, dw, how.dtype)
    dend = xp.zeros_like(begin) if dend is None else as_computed(xp, dend, how.dtype)
    moved = dw * k * slope
    each = [_sums_vjp(how, x, s, -moved / (A + how.eps), dend) for s in how.sequences]
    c = _concatenated(xp, [y for y, _ in each]) if each else A
    dbegin = rows(xp, begin, [y for _, y in each], how.sequences)
    dk = sum_of_groups(xp, dw * m + 2 * b * k * c, x.k.shape[-2])
    da = xp.exp(x.a) * xp.sum(_before(how, A, begin) * c, axis=-1)
    return Keys(dk, da, xp.sum(k * k * c, axis=-1), over_tokens(xp, xp.sum(moved, axis=-1))), dbegin


def _kernels(how: Bounds, x: Keys, *more: Array | None) -> Any:
    """The passes for NumPy arrays that are not empty."""
    if not x.k.size or not x.b.size or numpy_kernels(how.xp, *x, *more) is None:
        return None
    from .cpu import preconditioner

    return preconditioner


def _cuda_kernels(how: Bounds, x: Keys, *more: Array | None) -> Any:
    """Those for CuPy arrays."""
    if not is_cupy(how.xp):
        return None
    from .cuda import preconditioner

    return preconditioner if preconditioner.supports(x, *more) else None


def _computed(how: Bounds, x: Keys, begin: Array | None) -> tuple[Keys, Array]:
    """The arrays in the dtype of the computation, A_0 of zeros if there is none."""
    xp, (*lead, _, H) = how.xp, x.b.shape
    if begin is None:
        ragged = bool(how.sequences) and how.sequences[0].row is not None
        owners = (len(how.sequences),) if ragged else tuple(lead)
        begin = xp.zeros((*owners, H, x.k.shape[-1]), dtype=how.dtype, device=device(x.k))
    return Keys(*(as_computed(xp, y, how.dtype) for y in x)), as_computed(xp, begin, how.dtype)


def _wide(how: Bounds, x: Keys) -> Array:
    """The key of every head of the sums."""
    return shared_heads(how.xp, x.k, x.b.shape[-1])


def _factor(how: Bounds, x: Keys, A: Array) -> tuple[Array, Array]:
    """(m, dm / dcenter)"""
    xp, rate = how.xp, math.log(how.span)
    r = xp.log(A + how.eps) - x.center[:, None]
    over = 1 / (1 + xp.abs(r))
    m = xp.exp(-rate * r * over)
    return m, rate * m * over * over


def _sums(how: Bounds, x: Keys, begin: Array) -> Array:
    """A after every token: prefixes of affine maps, A_0 being part of the first one."""
    xp, each, k = how.xp, [], _wide(how, x)
    new, fade = x.b[..., None] * k * k, xp.exp(x.a)[..., None]
    for s in how.sequences:
        own, keep = (xp.moveaxis(y[..., s.start : s.stop, :, :], -3, 0) for y in (new, fade))
        own = xp.concat([own[:1, ...] + keep[:1, ...] * row(begin, s), own[1:, ...]], axis=0)
        each.append(xp.moveaxis(prefixes(xp, affine, (keep, own))[1], 0, -3))
    return _concatenated(xp, each) if each else xp.zeros_like(new)


def _sums_vjp(how: Bounds, x: Keys, s: Sequence, d: Array, dend: Array) -> tuple[Array, Array]:
    """(c of a sequence, dA_0) from the gradient d of each A alone: the same prefixes, from the last token on."""
    xp = how.xp
    if s.stop == s.start:
        return d[..., s.start : s.stop, :, :], row(dend, s)
    own, keep = (xp.moveaxis(y[..., s.start : s.stop, :, :], -3, 0) for y in (d, xp.exp(x.a)[..., None]))
    own = xp.flip(xp.concat([own[:-1, ...], own[-1:, ...] + row(dend, s)], axis=0), axis=0)
    later = xp.flip(xp.concat([keep[1:, ...], xp.ones_like(keep[:1, ...])], axis=0), axis=0)
    c = xp.flip(prefixes(xp, affine, (later, own))[1], axis=0)
    return xp.moveaxis(c, 0, -3), keep[0, ...] * c[0, ...]


def _before(how: Bounds, A: Array, begin: Array) -> Array:
    """A_{t-1} from A_t."""
    xp, each = how.xp, []
    for s in how.sequences:
        first = xp.broadcast_to(row(begin, s)[..., None, :, :], (*A.shape[:-3], 1, *A.shape[-2:]))
        each.append(xp.concat([first, A[..., s.start : s.stop, :, :]], axis=-3)[..., : s.stop - s.start, :, :])
    return _concatenated(xp, each) if each else A


def _concatenated(xp: Namespace, parts: list[Array]) -> Array:
    """The tokens of all sequences."""
    return parts[0] if len(parts) == 1 else xp.concat(parts, axis=-3)
