"""Descent as sums: the coefficients of what the weights of each token are made of, and their transpose.

    s_t = mu_t s_{t-1} + G_t,   w_t = alpha_t w_{t-1} + beta_t s_t,   r_t = a + gain_t (w_t - a)

G_t is the step of token t, and a row of coefficients has one number for each of W, S (with momentum), A (with gain) and
G_1 .. G_n: rows of the weights r_t that are read, of the last w, of the last s, and of the
weights before each token, where gradients are theirs. They follow from this recurrence: no
product of rates is divided by another.
"""

from __future__ import annotations

from typing import Any

from ..ops.host import numpy_kernels
from ..runtime.arrays import Array, Namespace, device, is_cupy, lower_ones
from .fused import appended
from .types import Learner, Rates, is_exact


def names_of(rates: Rates) -> tuple[str, ...]:
    """What the coefficients before those of the steps belong to."""
    return ("W", *(("S",) if rates.mu is not None else ()), *(("A",) if rates.gain is not None else ()))


def coefficients(xp: Namespace, f: Learner, rates: Rates, n: int, like: Array) -> tuple[Array, Any]:
    """(rows (..., rows, B + n), what the transpose reads).

    The rows: n of queries, 1 of the last w, with momentum 1 of the last s, and where gradients are exact n of theirs.
    """
    names, kind, before = names_of(rates), {"dtype": like.dtype, "device": device(like)}, f.read == "before"
    B = len(names)
    unit = xp.eye(B + n, **kind)
    if all(y is None for y in (rates.alpha, rates.mu, rates.beta)):
        sums = [lower_ones(xp, n, like.dtype, device(like), strict) for strict in (before, True)]
        rows = [sums[0], xp.ones((1, n), **kind), *([_points(xp, f, sums[1])] if is_exact(f, rates) else [])]
        lower = xp.concat(rows, axis=0)
        every = xp.concat([xp.broadcast_to(unit[:1, :B], (lower.shape[0], B)), lower], axis=1)
        residuals, read, rest = None, every[:n, :], every[n:, :]
    else:
        residuals = W, S = _recurrence(xp, rates, unit, B)
        earlier, ends = W[..., :n, :], W[..., n:, :]
        ends = ends if rates.mu is None else xp.concat([ends, S[..., n:, :]], axis=-2)
        read = earlier if before else W[..., 1:, :]
        own = earlier if rates.alpha is None or not f.decayed else rates.alpha * earlier
        rest = xp.concat([ends, _points(xp, f, own)], axis=-2) if is_exact(f, rates) else ends
    if rates.gain is not None:
        own = read
        read = unit[B - 1 : B, :] + rates.gain * (own - unit[B - 1 : B, :])
        residuals = residuals, own
        rest = xp.broadcast_to(rest, (*read.shape[:-2], *rest.shape[-2:]))
    return xp.concat([read, rest], axis=-2), residuals


def _points(xp: Namespace, f: Learner, w: Array) -> Array:
    """The rows of w at which gradients are taken: of the first token of each `shared`."""
    return w if f.shared == 1 else xp.repeat(w[..., :: f.shared, :], f.shared, axis=-2)[..., : w.shape[-2], :]


def _points_vjp(xp: Namespace, f: Learner, d: Array) -> Array:
    """The transpose."""
    if f.shared == 1:
        return d
    *lead, n, B = d.shape
    if left := -n % f.shared:
        d = xp.concat([d, xp.zeros((*lead, left, B), dtype=d.dtype, device=device(d))], axis=-2)
    d = xp.reshape(d, (*lead, -1, f.shared, B))
    d = xp.concat([xp.sum(d, axis=-2, keepdims=True), xp.zeros_like(d[..., 1:, :])], axis=-2)
    return xp.reshape(d, (*lead, n + left, B))[..., :n, :]


def _recurrence(xp: Namespace, rates: Rates, unit: Array, B: int) -> tuple[Array, Array]:
    """w_t and s_t for t = 0 .. n, (..., n + 1, B + n); of NumPy arrays in a compiled loop."""
    alpha, mu, beta, n = rates.alpha, rates.mu, rates.beta, unit.shape[-1] - B
    given = [y for y in (alpha, mu, beta) if y is not None]
    if n and given[0].size and numpy_kernels(xp, *given) is not None:
        from .cpu.recurrence import recurrence

        return recurrence(alpha, mu, beta, n, B)
    if (cuda := _kernels(xp, rates, n)) is not None:
        return cuda.recurrence(xp, rates, n)
    zero = 0 * given[0][..., :1, :]
    w, s = zero + unit[:1, :], zero + unit[1:2, :]
    W, S = [w], [s]
    for t in range(n):
        at = slice(t, t + 1)
        s = zero + unit[B + t : B + t + 1, :] if mu is None else unit[B + t : B + t + 1, :] + mu[..., at, :] * s
        w = (s if beta is None else beta[..., at, :] * s) + (w if alpha is None else alpha[..., at, :] * w)
        W.append(w)
        S.append(s)
    return appended(xp, W), appended(xp, S)


def _kernels(xp: Namespace, rates: Rates, n: int) -> Any:
    """The kernels of the recurrence on CuPy arrays; None where they do not take tiles of n tokens."""
    if not is_cupy(xp):
        return None
    from .cuda import rates as cuda

    return cuda if cuda.takes(xp, rates, n) else None


def coefficients_vjp(xp: Namespace, f: Learner, rates: Rates, residuals: Any, d: Array) -> Rates:
    """Gradients of alpha, mu, gain and beta from those of the rows."""
    alpha, mu, gain, beta, B = rates.alpha, rates.mu, rates.gain, rates.beta, len(names_of(rates))
    given = {"alpha": alpha, "mu": mu, "beta": beta}
    n, before = d.shape[-1] - B, f.read == "before"
    read, points, dgain = d[..., :n, :], None, None
    if is_exact(f, rates):
        points = _points_vjp(xp, f, d[..., -n:, :])
        d = d if f.shared == 1 else xp.concat([d[..., :-n, :], points], axis=-2)
    if gain is not None:
        residuals, own = residuals
        dgain = xp.sum(read * own, axis=-1, keepdims=True) - read[..., B - 1 : B]
        read = gain * read
    if residuals is None:
        return Rates((), gain=dgain)
    if (
        n
        and d.size
        and residuals[0].shape[:-2] == d.shape[:-2]
        and numpy_kernels(xp, *given.values(), read, d) is not None
    ):
        from .cpu.recurrence import recurrence_vjp

        flags = {"before": before, "decayed": f.decayed, "exact": points is not None}
        return Rates((), gain=dgain, **recurrence_vjp(given, residuals, read, d, flags))
    if not (before and f.decayed) and (cuda := _kernels(xp, rates, n)) is not None:
        # a row that is read before its step is one at which a gradient is taken
        both = [read if before else None, points]
        rest = [y for y in both if y is not None] or [xp.zeros_like(read)]
        own = rest[0] if len(rest) == 1 else rest[0] + rest[1]
        d = xp.concat([xp.zeros_like(read) if before else read, d[..., n : n + 2, :], own], axis=-2)
        found = cuda.recurrence_vjp(xp, rates, residuals, d, f.decayed)
        return Rates((), gain=dgain, **found)
    (W, S), dw = residuals, d[..., n : n + 1, :]
    each: dict[str, list[Array]] = {"alpha": [], "mu": [], "beta": []}
    ds = 0 * dw if mu is None else d[..., n + 1 : n + 2, :]
    dot = lambda x, y: xp.sum(x * y, axis=-1, keepdims=True)  # noqa: E731
    for t in reversed(range(n)):
        at, w, s, own = slice(t, t + 1), W[..., t : t + 1, :], S[..., t : t + 1, :], read[..., t : t + 1, :]
        dw = dw if before else dw + own
        if beta is not None:
            each["beta"].append(dot(dw, S[..., t + 1 : t + 2, :]))
        ds = ds + (dw if beta is None else beta[..., at, :] * dw)
        dalpha = dot(dw, w)
        dw = dw if alpha is None else alpha[..., at, :] * dw
        each["mu"].append(dot(ds, s))
        ds = 0 * ds if mu is None else mu[..., at, :] * ds
        dw = dw + own if before else dw
        if points is not None:
            point = points[..., at, :]
            dalpha = dalpha + dot(point, w) if f.decayed else dalpha
            dw = dw + (alpha[..., at, :] * point if f.decayed and alpha is not None else point)
        each["alpha"].append(dalpha)
    whole = {name: appended(xp, y[::-1]) for name, y in each.items() if given[name] is not None}
    return Rates((), gain=dgain, **whole)
