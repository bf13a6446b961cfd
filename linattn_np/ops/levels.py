"""Levels of log-linear attention as heads: what surrounds a call of a core that computes all of them at once.

    spread   y[t, h N + n] = w(t, h, l) x[t, h],  l = first + n, n = 0 .. N - 1
    gather   x[t, h] = base[t, h] + sum over n of w(t, h, l) y[t, h N + n]      each is the transpose of the other
    weigh    A'_tj = lam_t[level(t, j)] A_tj, 0 for j > t, where row t has the 64 positions of its chunk

w(t, h, l), with p the position of token t:

    writes   1 where p is in the first half of its block of 2^l positions, else 0
    reads    lam_t[l] where it is in the second half, else 0; without lam 1 there
    keeps    1, but at the first position of a block, where spread gives -inf and gather 0
    one      1

On CuPy arrays of 16 and 32 bits each is a kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..runtime.arrays import Array, Namespace, cast, device, is_cupy
from .host import write

CHUNK = 64


class LevelHeads(NamedTuple):
    """Levels first .. first + n - 1; positions of the tokens (tokens,), None where they are t mod T."""

    first: int
    n: int
    T: int
    positions: Any


def _kernels(xp: Namespace, dtype: Any, *arrays: Array | None) -> Any:
    """The module of kernels, None where they do not take the arrays."""
    if is_cupy(xp):
        from .cuda import levels

        return levels if levels.supports(dtype, *arrays) else None
    return None


def resized(xp: Namespace, arrays: Sequence[Array], T: int, long: int) -> list[Array]:
    """Sequences of T rows as sequences of `long`: their first rows, zeros after them, of arrays (rows, ...).

    On CuPy arrays a launch.
    """
    if is_cupy(xp):
        from .cuda import join

        if join.resizes(arrays, T):
            return join.resized(arrays, T, long)
    found = list[Array]()
    for y in arrays:
        rows = xp.reshape(y, (-1, T, *y.shape[1:]))[:, :long, ...]
        to = xp.empty((rows.shape[0], long, *y.shape[1:]), dtype=y.dtype)
        write(xp, to[:, : rows.shape[1], ...], rows)
        if long > T:
            write(xp, to[:, T:, ...], xp.zeros((), dtype=y.dtype, device=device(y)))
        found.append(xp.reshape(to, (-1, *y.shape[1:])))
    return found


def spread(
    xp: Namespace, x: Array, at: LevelHeads, weight: str, dtype: Any, lam: Any = None, dots: Any = None
) -> Array:
    """y (tokens, H n, width) in `dtype` of x (tokens, H, width).

    dots: (other, dlam): columns first .. of dlam (tokens, H, levels) become <x, other> where the weight is not 0.
    """
    others = () if dots is None else dots
    if (kernels := _kernels(xp, dtype, x, lam, *others)) is not None:
        return kernels.spread(x, at, weight, dtype, lam, dots)
    counts = _counts(xp, x, at, weight)
    y = _weights(xp, at, weight, lam, dtype) * cast(xp, x, dtype)[:, :, None, :]
    y = xp.where(counts, y, xp.asarray(-xp.inf if weight == "keeps" else 0.0, dtype=dtype))
    if dots is not None:
        other = xp.reshape(dots[0], y.shape)
        products = xp.where(counts, cast(xp, x, dtype)[:, :, None, :] * other, xp.zeros((), dtype=dtype))
        own = dots[1][..., at.first : at.first + at.n]
        own[...] = xp.sum(products, axis=-1)[..., : own.shape[-1]]
    return xp.reshape(y, (x.shape[0], x.shape[1] * at.n, x.shape[2]))


def gather(
    xp: Namespace, y: Array, at: LevelHeads, weight: str, dtype: Any, lam: Any = None, base: Any = None
) -> Array:
    """x (tokens, H, width) in `dtype` of y (tokens, H n, width)."""
    if (kernels := _kernels(xp, dtype, y, lam, base)) is not None:
        return kernels.gather(y, at, weight, dtype, lam, base)
    y = xp.reshape(cast(xp, y, dtype), (y.shape[0], y.shape[1] // at.n, at.n, y.shape[2]))
    zero = xp.zeros((), dtype=dtype)
    x = xp.sum(xp.where(_counts(xp, y, at, weight), _weights(xp, at, weight, lam, dtype) * y, zero), axis=2)
    return x if base is None else x + base


def weigh(xp: Namespace, A: Array, at: LevelHeads, lam: Array) -> Array:
    """A (tokens, H, 64) with the weights of levels."""
    if (kernels := _kernels(xp, A.dtype, A, lam)) is not None:
        return kernels.weigh(A, at, lam)
    return A * _table(xp, A, at, lam)[0]


def weigh_vjp(xp: Namespace, A: Array, at: LevelHeads, lam: Array, d: Array) -> tuple[Array, Array]:
    """(gradient of A, dlam)."""
    if (kernels := _kernels(xp, A.dtype, A, lam, d)) is not None:
        return kernels.weigh_vjp(A, at, lam, d)
    table, hot = _table(xp, A, at, lam)
    return d * table, ((A * d)[:, :, None, :] @ hot)[:, :, 0, :]


def _positions(xp: Namespace, x: Array, at: LevelHeads) -> Array:
    return xp.arange(x.shape[0], device=device(x)) % at.T if at.positions is None else at.positions


def _counts(xp: Namespace, x: Array, at: LevelHeads, weight: str) -> Array:
    """(tokens, 1, count, 1): where the weight is not 0."""
    if weight == "one":
        return xp.ones((1, 1, at.n, 1), dtype=xp.bool)
    p, level = _positions(xp, x, at)[:, None], xp.arange(at.first, at.first + at.n, device=device(x))
    half = p // 2 ** (level - 1) % 2
    counts = p % 2**level != 0 if weight == "keeps" else half == (weight == "reads")
    return counts[:, None, :, None]


def _weights(xp: Namespace, at: LevelHeads, weight: str, lam: Any, dtype: Any) -> Any:
    if weight != "reads" or lam is None:
        return 1
    lam = cast(xp, lam[..., at.first : at.first + at.n], dtype)
    none = xp.zeros((*lam.shape[:-1], at.n - lam.shape[-1]), dtype=dtype, device=device(lam))
    return xp.concat([lam, none], axis=-1)[..., None]  # the last level of a state is never read


def _table(xp: Namespace, A: Array, at: LevelHeads, lam: Array) -> tuple[Array, Array]:
    """(lam_t[level(t, j)] (tokens, H, 64), 0 for j > t; 1 where level(t, j) = l (tokens, 1, 64, levels))."""
    own, j = _positions(xp, A, at)[:, None] % CHUNK, xp.arange(CHUNK, device=device(A))
    apart = own ^ j
    level = sum(xp.astype(apart >= 2**n, apart.dtype) for n in range(6))
    hot = (level[..., None] == xp.arange(lam.shape[-1], device=device(A))) & (j <= own)[..., None]
    hot = cast(xp, hot, A.dtype)[:, None, ...]
    return (hot @ cast(xp, lam, A.dtype)[..., None])[..., 0], hot
