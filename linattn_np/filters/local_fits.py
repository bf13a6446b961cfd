"""window_least_squares: the fit of the last tokens, of each its own, weighted by age and by distance.

    W_t = argmin_W sum_i w_ti |d_i - x_i W|^2 + r_t |W|^2,     i = t - c .. t - 1
    w_ti = lambda_{i+1} .. lambda_{t-1} e^{-|x_t - x_i|^2 / (2 h^2)}
    (X^T w X + r I) W = X^T w D,   y_t = x_t W_t

With queries, q_t is in the place of x_t, and its fit has token t: out_t = q_t W_{t+1}, the read of t + 1.

The sums are those of the rows themselves: nothing is subtracted that has left the window. With M the solution of
(X^T w X + r I) M = dW, E = D - X W the errors, and the rows of a window below each other,

    dX = w (E M^T - (X M) W^T),   dD = w X M,   dw_i = <x_i M, e_i>
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..runtime.arrays import Array, Namespace, device
from .arguments import Filtered, PastState, Pullback, Signals
from .windows import gathered, gathered_vjp

MOST = 2**21  # numbers of the windows that are computed at once


class Rows(NamedTuple):
    """Rows with those before the call in front, their log lambda, and the centers of the reads, or their gradients."""

    x: Array  # (..., T + c, K)
    d: Array  # (..., T + c, V)
    log: Array  # (..., T + c, 1)
    at: Array  # (..., T + 1, K): x_t, and x of the last token once more; with queries x of the last token, and q_t


class Window(NamedTuple):
    """The windows of some reads, and their fit."""

    X: Array  # (..., n, c, K)
    D: Array
    apart: Array  # (..., n, c, K): x_t - x_i
    w: Array  # (..., n, c, 1)
    A: Array  # (..., n, K, K)
    W: Array  # (..., n, K, V)


def rows_of(s: Signals) -> tuple[Rows, PastState]:
    """The rows, and the tokens before the call: of zeros, which weigh nothing, if there is no state."""
    xp, c, (*lead, T, K) = s.xp, int(s.numbers["window"]), s.x.shape
    past = s.state
    if past is None:
        x, d = (xp.zeros((*lead, c, n), dtype=s.dtype, device=device(s.x)) for n in (K, s.d.shape[-1]))
        past = PastState(x, d, xp.ones((*lead, c), dtype=s.dtype, device=device(s.x)))
    x, d = xp.concat([past.x, s.x], axis=-2), xp.concat([past.d, s.d], axis=-2)
    log = xp.log(xp.concat([past.rate, s.rate], axis=-1))[..., None]
    at = [s.x, x[..., T + c - 1 :, :]] if s.q is None else [x[..., c - 1 : c, :], s.q]
    return Rows(x, d, log, xp.concat(at, axis=-2)), past


def first_read(s: Signals) -> int:
    """The first read that anything needs: queries need none before the first token, but for the weights of no token."""
    return 0 if s.q is None else min(1, s.x.shape[-2])


def fit(s: Signals, rows: Rows, a: int, b: int) -> Window:
    """The windows of reads a to b."""
    xp, c, K = s.xp, int(s.numbers["window"]), s.x.shape[-1]
    X, D, log = (gathered(xp, y[..., a : b + c - 1, :], c) for y in rows[:3])
    apart = rows.at[..., a:b, None, :] - X
    later = xp.concat([log[..., 1:, :], xp.zeros_like(log[..., :1, :])], axis=-2)
    age = xp.flip(xp.cumulative_sum(xp.flip(later, axis=-2), axis=-2), axis=-2)
    if s.numbers["bandwidth"] is not None:
        age = age - 0.5 * xp.sum(apart * apart, axis=-1, keepdims=True) / s.numbers["bandwidth"] ** 2
    w = xp.exp(age)
    A, B = (xp.matmul(xp.matrix_transpose(X), w * y) for y in (X, D))
    trace, least = xp.sum(xp.linalg.diagonal(A), axis=-1), K * float(xp.finfo(s.dtype).eps)
    ridge = xp.clip(least * trace, s.numbers["delta"], None)[..., None, None]
    A = A + ridge * xp.eye(K, dtype=s.dtype, device=device(A))
    return Window(X, D, apart, w, A, xp.linalg.solve(A, B))


def fit_vjp(s: Signals, own: Window, dW: Array) -> Rows:
    """Gradients of the rows of the reads, those of the centers by their distances alone."""
    xp, (X, D, apart, w, A, W) = s.xp, own
    M = xp.linalg.solve(A, dW)
    XM, E = xp.matmul(X, M), D - xp.matmul(X, W)
    dX = w * (xp.matmul(E, xp.matrix_transpose(M)) - xp.matmul(XM, xp.matrix_transpose(W)))
    dage = w * xp.sum(XM * E, axis=-1, keepdims=True)
    sums = xp.cumulative_sum(dage, axis=-2)
    dlog = xp.concat([xp.zeros_like(sums[..., :1, :]), sums[..., :-1, :]], axis=-2)
    dat = xp.zeros_like(apart[..., 0, :])
    if s.numbers["bandwidth"] is not None:
        moved = dage * apart / s.numbers["bandwidth"] ** 2
        dX, dat = dX + moved, -xp.sum(moved, axis=-2)
    dx, dd, dlog = (gathered_vjp(xp, y) for y in (dX, w * XM, dlog))
    return Rows(dx, dd, dlog, dat)


def parts_of(s: Signals) -> list[tuple[int, int]]:
    """(first, last + 1) of the reads that are computed at once."""
    *lead, T, K = s.x.shape
    count = int(s.numbers["window"]) * (K + s.d.shape[-1])
    for n in lead:
        count *= n
    each = max(MOST // max(count, 1), 1)
    return [(a, min(a + each, T + 1)) for a in range(first_read(s), T + 1, each)]


def window_filter(s: Signals, gradients: bool) -> tuple[Filtered, Pullback | None]:
    """Filtered, and its pullback."""
    xp, c, (rows, past), T = s.xp, int(s.numbers["window"]), rows_of(s), s.x.shape[-2]
    read, W = list[Array](), xp.zeros(())
    for a, b in parts_of(s):
        W = fit(s, rows, a, b).W
        read.append(xp.matmul(rows.at[..., a:b, None, :], W)[..., 0, :])
    y = xp.concat(read, axis=-2)[..., :T, :]
    rate = xp.concat([past.rate, s.rate], axis=-1)
    state = PastState(*(xp.asarray(z, copy=True) for z in (rows.x[..., T:, :], rows.d[..., T:, :], rate[..., T:])))
    found = Filtered(y, s.d - y, W[..., -1, :, :], state)
    if not gradients:
        return found, None

    def pullback(d: Filtered) -> tuple[Array, Array, Array, PastState, Array]:
        dy = xp.zeros_like(s.d) if d.prediction is None else d.prediction
        dy = _between(xp, dy if d.error is None else dy - d.error, int(s.q is not None), T + 1)
        dx, dd, dlog, dat = (xp.zeros_like(z) for z in rows)
        for a, b in parts_of(s):
            own, part = fit(s, rows, a, b), dy[..., a:b, :]
            dW = rows.at[..., a:b, :, None] * part[..., None, :]
            if b > T and d.weights is not None:
                dW = xp.concat([dW[..., :-1, :, :], dW[..., -1:, :, :] + d.weights[..., None, :, :]], axis=-3)
            more = fit_vjp(s, own, dW)
            dread = xp.matmul(own.W, part[..., None])[..., 0] + more.at
            each = zip((dx, dd, dlog, dat), (*more[:3], dread), strict=True)
            dx, dd, dlog, dat = (z + _between(xp, m, a, z.shape[-2]) for z, m in each)
        if s.q is None:
            dx = dx + _between(xp, dat[..., :T, :], c, T + c) + _between(xp, dat[..., T:, :], T + c - 1, T + c)
        else:
            dx = dx + _between(xp, dat[..., :1, :], c - 1, T + c)
        drate = dlog[..., 0] / rate
        if d.state is not None:
            dx, dd = (z + _between(xp, m, T, T + c) for z, m in zip((dx, dd), d.state[:2], strict=True))
            drate = drate + _between(xp, d.state.rate[..., None], T, T + c)[..., 0]
        dd_own = dd[..., c:, :] if d.error is None else dd[..., c:, :] + d.error
        dpast = PastState(dx[..., :c, :], dd[..., :c, :], drate[..., :c])
        return dx[..., c:, :], dd_own, drate[..., c:], dpast, dat[..., 1:, :]

    return found, pullback


def _between(xp: Namespace, y: Array, before: int, length: int) -> Any:
    """Rows with zeros before and behind them."""
    *lead, n, D = y.shape
    zeros = [xp.zeros((*lead, m, D), dtype=y.dtype, device=device(y)) for m in (before, length - before - n)]
    return xp.concat([zeros[0], y, zeros[1]], axis=-2)
