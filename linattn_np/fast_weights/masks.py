"""Descent as sums: the coefficients of what the weights of each token are made of, and their transpose.

    s_t = mu_t s_{t-1} + G_t,   w_t = alpha_t w_{t-1} + s_t,   r_t = a + gain_t (w_t - a)

G_t is the step of token t, and a row of coefficients has one number for each of W, S (with momentum), A (with gain) and
G_1 .. G_n: rows of the weights r_t that are read, of the last w and of the last s. They follow from this recurrence: no
product of rates is divided by another.
"""

from __future__ import annotations

from typing import Any

from ..runtime.arrays import Array, Namespace, device, lower_ones
from .types import Rates


def names_of(rates: Rates) -> tuple[str, ...]:
    """What the coefficients before those of the steps belong to."""
    return ("W", *(("S",) if rates.mu is not None else ()), *(("A",) if rates.gain is not None else ()))


def coefficients(xp: Namespace, rates: Rates, n: int, like: Array, before: bool) -> tuple[Array, Any]:
    """(rows (..., n + 1, B + n), and n + 2 with momentum; what the transpose reads). before: r_t is of w_{t-1}."""
    names, kind = names_of(rates), {"dtype": like.dtype, "device": device(like)}
    B = len(names)
    unit = xp.eye(B + n, **kind)
    if rates.alpha is None and rates.mu is None:
        first = xp.broadcast_to(unit[:1, :B], (n + 1, B))
        lower = lower_ones(xp, n, like.dtype, device(like), before)
        rows, kept = xp.concat([first, xp.concat([lower, xp.ones((1, n), **kind)], axis=0)], axis=1), None
        read, ends = rows[:n, :], rows[n:, :]
    else:
        kept, ends = _recurrence(xp, rates, unit, B)
        read = xp.concat([w for w, _ in (kept[:-1] if before else kept[1:])], axis=-2)
    if rates.gain is not None:
        own = read
        read = unit[B - 1 : B, :] + rates.gain * (own - unit[B - 1 : B, :])
        kept = kept, own
        ends = xp.broadcast_to(ends, (*read.shape[:-2], *ends.shape[-2:]))
    return xp.concat([read, ends], axis=-2), kept


def _recurrence(xp: Namespace, rates: Rates, unit: Array, B: int) -> tuple[Any, Array]:
    """((w_t, s_t) for t = 0 .. n, the last rows)."""
    alpha, mu = rates.alpha, rates.mu
    zero = 0 * (mu if alpha is None else alpha)[..., :1, :]
    w, s = zero + unit[:1, :], zero + unit[1:2, :]
    every = [(w, s)]
    for t in range(unit.shape[-1] - B):
        s = zero + unit[B + t : B + t + 1, :] if mu is None else unit[B + t : B + t + 1, :] + mu[..., t : t + 1, :] * s
        w = s + (w if alpha is None else alpha[..., t : t + 1, :] * w)
        every.append((w, s))
    return every, w if mu is None else xp.concat([w, s], axis=-2)


def coefficients_vjp(xp: Namespace, rates: Rates, kept: Any, before: bool, d: Array) -> tuple[Any, Any, Any]:
    """(dalpha, dmu, dgain) from the gradients of the rows."""
    alpha, mu, gain, n = rates.alpha, rates.mu, rates.gain, d.shape[-1] - len(names_of(rates))
    read, dgain, dalpha, dmu = d[..., :n, :], None, list[Array](), list[Array]()
    if gain is not None:
        kept, own = kept
        B = len(names_of(rates))
        dgain = xp.sum(read * own, axis=-1, keepdims=True) - read[..., B - 1 : B]
        read = gain * read
    if kept is None:
        return None, None, dgain
    dw = d[..., n : n + 1, :]
    ds = 0 * dw if mu is None else d[..., n + 1 : n + 2, :]
    for t in reversed(range(n)):
        (w, s), own = kept[t], read[..., t : t + 1, :]
        dw = dw if before else dw + own
        ds = ds + dw
        if alpha is not None:
            dalpha.append(xp.sum(dw * w, axis=-1, keepdims=True))
            dw = alpha[..., t : t + 1, :] * dw
        if mu is not None:
            dmu.append(xp.sum(ds * s, axis=-1, keepdims=True))
            ds = mu[..., t : t + 1, :] * ds
        else:
            ds = 0 * ds
        dw = dw + own if before else dw
    cat = lambda each: xp.concat(each[::-1], axis=-2) if each else None  # noqa: E731
    return cat(dalpha), cat(dmu), dgain
