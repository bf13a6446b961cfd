"""Sums of log decays over tokens, each formed by adding its own terms; arrays are (..., C, D)."""

from __future__ import annotations

from collections.abc import Callable

from ...runtime.arrays import Array, Namespace, device, is_mutable, lower_ones
from .. import policy


def list_chunks(xp: Namespace, y: Array, axis: int = -3) -> list[Array]:
    """(..., N, C, D) as a list of N views."""
    y = xp.moveaxis(y, axis, 0)
    return [y[n, ...] for n in range(y.shape[0])]


def pad(xp: Namespace, x: Array, rows: int) -> Array:
    """(..., C, D) padded with zero rows to `rows` rows."""
    n = rows - x.shape[-2]
    if not n:
        return x
    return xp.concat([x, xp.zeros((*x.shape[:-2], n, x.shape[-1]), dtype=x.dtype, device=device(x))], axis=-2)


def pair_table(xp: Namespace, g: Array, exp: Callable[[Array], Array]) -> Array:
    """e^{s(j, i)} on and below the diagonal, 0 above: (..., C) to (..., C, C), by blocks of 8.

    Inside a block s is summed for every pair. Between blocks J < I it is e^{s(start_I, i)} e^{s(J, I)} e^{s(j, end_J)},
    three factors <= 1 whose exponents are sums of separate terms; the middle factor is a table of whole blocks.
    """
    C, where = g.shape[-1], device(g)
    if C <= policy.PAIR_TOKENS:
        s = exp(xp.cumulative_sum(g[..., None] * lower_ones(xp, C, g.dtype, where, strict=True), axis=-2))
        return s * lower_ones(xp, C, s.dtype, where)
    n = -(-C // policy.PAIR_TOKENS)
    g = xp.reshape(pad(xp, g[..., None], n * policy.PAIR_TOKENS), (*g.shape[:-1], n, policy.PAIR_TOKENS))
    inside, sums = pair_table(xp, g, exp), xp.cumulative_sum(g, axis=-1)
    between = down(xp, pair_table(xp, sums[..., -1], exp))  # (..., I, J): the gates of the blocks between
    reach = between[..., None] * inside[..., None, :, -1, :]  # (..., I, J, 8): from j to the start of I
    reach = xp.reshape(reach, (*reach.shape[:-2], 1, n * policy.PAIR_TOKENS))
    E = xp.reshape(exp(sums)[..., None] * reach, (*reach.shape[:-3], n, policy.PAIR_TOKENS, n, policy.PAIR_TOKENS))
    if is_mutable(xp):
        for i in range(n):
            E[..., i, :, i, :] = inside[..., i, :, :]
    else:
        E = E + inside[..., :, :, None, :] * xp.eye(n, dtype=inside.dtype, device=where)[:, None, :, None]
    E = xp.reshape(E, (*E.shape[:-4], n * policy.PAIR_TOKENS, n * policy.PAIR_TOKENS))
    return E[..., :C, :C]


# running sums over the token axis, each by adding its own terms


def prefix(xp: Namespace, x: Array) -> Array:
    """sum_{l <= t} x_l."""
    return xp.cumulative_sum(x, axis=-2)


def suffix(xp: Namespace, x: Array) -> Array:
    """sum_{l >= t} x_l."""
    return xp.flip(xp.cumulative_sum(xp.flip(x, axis=-2), axis=-2), axis=-2)


def before(xp: Namespace, x: Array) -> Array:
    """sum_{l < t} x_l."""
    return down(xp, prefix(xp, x))


def after(xp: Namespace, x: Array) -> Array:
    """sum_{l > t} x_l."""
    return up(xp, suffix(xp, x))


def down(xp: Namespace, x: Array) -> Array:
    """Rows shifted one token later; the first is zero."""
    return xp.concat([xp.zeros_like(x[..., :1, :]), x[..., :-1, :]], axis=-2)


def up(xp: Namespace, x: Array) -> Array:
    """Rows shifted one token earlier; the last is zero."""
    return xp.concat([x[..., 1:, :], xp.zeros_like(x[..., :1, :])], axis=-2)


def crossing(xp: Namespace, ds: Array) -> Array:
    """dg_t = sum over i >= t > j of ds_ij, the gradient of s(j, i): (..., C, C) -> (..., C, 1)."""
    C, where = ds.shape[-1], device(ds)
    later = xp.matrix_transpose(lower_ones(xp, C, ds.dtype, where)) @ ds
    return xp.sum(later * lower_ones(xp, C, ds.dtype, where, strict=True), axis=-1, keepdims=True)
