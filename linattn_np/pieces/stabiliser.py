"""A running maximum in log space, m_t = max(a_t + m_{t-1}, b_t): the gauge in which exponential gates stay <= 1."""

from __future__ import annotations

from ..ground.namespace import Array, Namespace, device


def running_maximum(xp: Namespace, a: Array, b: Array, m: Array) -> Array:
    """m_1 .. m_T from m_0.   a, b (..., T, H), m_0 (..., H).

    Element t is the map m -> max(a_t + m, b_t). Two of them compose to (a_1 + a_2, max(a_2 + b_1, b_2)), so that
    log2 T rounds do all, and every m_t is a sum of its own terms.
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
    """m_{t-1} from m_t: (..., T, H)."""
    first = xp.broadcast_to(m_0[..., None, :], (*m.shape[:-2], min(m.shape[-2], 1), m.shape[-1]))
    return xp.concat([first, m[..., :-1, :]], axis=-2)


def last_maximum_vjp(
    xp: Namespace, a: Array, b: Array, m: Array, m_0: Array, dm: Array
) -> tuple[Array, Array, Array]:
    """(da, db, dm_0) from the gradient dm (..., H) of m_T: it goes to the one b_j, or m_0, that m_T comes from, and to
    the a_t on the way. Where both sides of a maximum are equal, m_{t-1} counts.
    """
    T = b.shape[-2]
    if T == 0:
        return xp.zeros_like(a), xp.zeros_like(b), dm
    t = xp.arange(T, device=device(b))[:, None]
    own = b > a + delayed(xp, m, m_0)  # m_t = b_t
    origin = xp.max(xp.where(own, t, -1), axis=-2, keepdims=True)  # the last of them; -1: m_0
    dm, zero = dm[..., None, :], xp.zeros_like(b)
    da, db = xp.where(t > origin, dm, zero), xp.where(t == origin, dm, zero)
    return da, db, xp.where(origin < 0, dm, xp.zeros_like(dm))[..., 0, :]
