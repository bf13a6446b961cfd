"""Sums of log decays over tokens, each formed by adding its own terms; arrays are (..., C, D)."""

from __future__ import annotations

from collections.abc import Callable

from ..ground.namespace import Array, Namespace, device, is_mutable, lower_ones

PAIRS = 8  # tokens of a block whose pairs are summed one by one


def list_chunks(xp: Namespace, y: Array, axis: int = -3) -> list[Array]:
    """(..., N, C, D) as a list of N views."""
    y = xp.moveaxis(y, axis, 0)
    return [y[n, ...] for n in range(y.shape[0])]


def pad(xp: Namespace, x: Array, rows: int) -> Array:
    """(..., C, D) with zeros below, to `rows` rows."""
    n = rows - x.shape[-2]
    if not n:
        return x
    return xp.concat([x, xp.zeros((*x.shape[:-2], n, x.shape[-1]), dtype=x.dtype, device=device(x))], axis=-2)


def pair_table(xp: Namespace, g: Array, exp: Callable[[Array], Array]) -> Array:
    """e^{s(j, i)} on and below the diagonal, 0 above: (..., C) to (..., C, C), by blocks of 8.

    Inside a block s is summed for every pair. Between blocks J < I it is e^{s(start_I, i)} e^{s(J, I)} e^{s(j, end_J)},
    three factors <= 1 that are sums of their own terms; the one in the middle is a table of whole blocks.
    """
    C, where = g.shape[-1], device(g)
    if C <= PAIRS:
        s = exp(xp.cumulative_sum(g[..., None] * lower_ones(xp, C, g.dtype, where, strict=True), axis=-2))
        return s * lower_ones(xp, C, s.dtype, where)
    n = -(-C // PAIRS)
    g = xp.reshape(pad(xp, g[..., None], n * PAIRS), (*g.shape[:-1], n, PAIRS))
    own, sums = pair_table(xp, g, exp), xp.cumulative_sum(g, axis=-1)
    between = down(xp, pair_table(xp, sums[..., -1], exp))  # (..., I, J): the gates of the blocks between
    reach = between[..., None] * own[..., None, :, -1, :]  # (..., I, J, 8): from j to the start of I
    reach = xp.reshape(reach, (*reach.shape[:-2], 1, n * PAIRS))
    E = xp.reshape(exp(sums)[..., None] * reach, (*reach.shape[:-3], n, PAIRS, n, PAIRS))
    if is_mutable(xp):
        for i in range(n):
            E[..., i, :, i, :] = own[..., i, :, :]
    else:
        E = E + own[..., :, :, None, :] * xp.eye(n, dtype=own.dtype, device=where)[:, None, :, None]
    E = xp.reshape(E, (*E.shape[:-4], n * PAIRS, n * PAIRS))
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
    """Rows moved one token later, zeros first."""
    return xp.concat([xp.zeros_like(x[..., :1, :]), x[..., :-1, :]], axis=-2)


def up(xp: Namespace, x: Array) -> Array:
    """Rows moved one token earlier, zeros last."""
    return xp.concat([x[..., 1:, :], xp.zeros_like(x[..., :1, :])], axis=-2)


def crossing(xp: Namespace, W: Array) -> Array:
    """sum over i >= t > j of W_ij: (..., C, C) -> (..., C, 1)."""
    C, where = W.shape[-1], device(W)
    later = xp.matrix_transpose(lower_ones(xp, C, W.dtype, where)) @ W
    return xp.sum(later * lower_ones(xp, C, W.dtype, where, strict=True), axis=-1, keepdims=True)
