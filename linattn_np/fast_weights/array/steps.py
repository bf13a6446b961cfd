"""Steps of all tokens of a tile at once, where they are no sums of gradients: Muon, and losses of a window.

The gradients of a tile are taken at the anchor A, as factors l_j^T r_j of its rows (of a window also those before it):

    G_t = eta_t sum_j share_j l_j^T r_j        over the window of token t
    S_t = mu_t S_{t-1} - G_t
    W_t = alpha_t W_{t-1} + beta_t NS(S_t)
    out_t = f_R(q_t),   R = A + gain_t (W_t - A)
"""

from __future__ import annotations

from math import prod
from typing import Any

from ...runtime.arrays import Array, Namespace, device
from ..batches import close_fwd, close_vjp, mixed, mixed_vjp
from ..fused import matmul, stacked
from ..inner import gradient, gradient_vjp, predict, predict_vjp
from ..models import body_of
from ..optimisers import directions, directions_vjp
from ..products import Shared
from ..types import Learner, Rates, State, Tokens, Tree, filled, plus
from ..window import Rows, after, rows_of, rows_vjp
from .running import running, running_vjp

ARRAYS = 2  # of a matrix for each token: momenta and weights
MOST = 2**19  # numbers of a head in one of them


def tokens_of(anchor: Tree) -> int:
    """The most tokens of a tile, whatever the number of heads."""
    return max(1, MOST // max(1, sum(prod(w.shape[-2:]) for w in anchor)))


class Steps:
    """Tokens of one mini-batch, with the state before them; the functions of chunks.Tile."""

    keep = False

    def __init__(
        self, f: Learner, xp: Namespace, x: Tokens, state: State, slow: Tree, learns: bool = True, saved: Any = None
    ) -> None:
        """saved: of the forward's tile."""
        self.f, self.xp, self.x, self.state, self.slow = f, xp, x, state, slow
        self.n, self.last = x.k.shape[-2], state.n + x.k.shape[-2]
        self.rows, self.muon = rows_of(xp, f, x, state), _muon_of(f)
        self.A = self._shared(state.anchor)
        if saved is not None:
            vars(self).update(saved)
            return
        self.factors, self.residuals = gradient(f, self.A, slow, self.rows.k, self.rows.v)
        self.S = self._momenta()
        D, self.inner = directions(xp, self.muon, self.S, False)
        beta, self.D = x.rates.beta, () if x.rates.beta is None else D
        steps = tuple(1 * y for y in D) if beta is None and self.muon is None else D  # `running` writes into them
        steps = steps if beta is None else tuple(beta[..., None] * y for y in D)
        each = zip(state.weights, steps, strict=True)
        self.W = tuple(running(xp, x.rates.alpha, first, y) for first, y in each)

    @property
    def saved(self) -> dict[str, Any]:
        """What the transpose reads beside the state, as arrays."""
        return {n: getattr(self, n) for n in ("factors", "residuals", "S", "D", "inner", "W")}

    @property
    def numbers(self) -> int:
        """About as many numbers are stored."""
        return ARRAYS * self.n * sum(prod(w.shape) for w in self.state.anchor)

    def _shared(self, tree: Tree) -> Shared:
        return Shared(self.xp, tree, body_of(self.f).matrices)

    # momenta

    def _windows(self, y: Array) -> Array:
        """The rows of the window of each token: (..., n, c, D) of (..., n + c - 1, D)."""
        return stacked(self.xp, [y[..., i : i + self.n, :] for i in range(self.f.window)], axis=-2)

    def _windows_vjp(self, d: Array) -> Array:
        """The sums of the cotangents of each row."""
        xp, c, total = self.xp, self.f.window, 0
        for i in range(c):
            own = d[..., i, :]
            kind = {"dtype": d.dtype, "device": device(d)}
            zeros = [xp.zeros((*own.shape[:-2], k, own.shape[-1]), **kind) for k in (i, c - 1 - i)]
            total = total + xp.concat([zeros[0], own, zeros[1]], axis=-2)
        return total

    def _eta(self, p: int) -> int:
        return p * len(self.x.rates.eta) // len(self.factors)

    def _factors_of(self, p: int) -> tuple[Array, Array]:
        """(-eta_t l_j, share_j r_j) of the windows."""
        (l, r), shares, eta = self.factors[p], self.rows.share, self.x.rates.eta[self._eta(p)]
        return -eta[..., None] * self._windows(l), self._windows(r if shares is None else shares * r)

    def _momenta(self) -> Tree:
        """S_1 .. S_n, those of a bias (..., n, 1, M)."""
        xp, found = self.xp, list[Array]()
        for p in range(len(self.factors)):
            l, r = self._factors_of(p)
            found.append(matmul(xp, xp.matrix_transpose(l), r))
            if self.A.step == 2:
                found.append(-self.x.rates.eta[self._eta(p)][..., None] * xp.sum(r, axis=-2, keepdims=True))
        if (mu := self.x.rates.mu) is None:
            return tuple(found)
        return tuple(running(xp, mu, first, y) for first, y in zip(self.state.slots[0], found, strict=True))

    def _momenta_vjp(self, dS: Tree, dlast: Any) -> tuple[list[Any], list[Any], Any, Any, Tree]:
        """(cotangents of l and r of each matrix, of the step sizes, of shares, of mu, of the momenta before)."""
        xp, (_, eta_of, mu), dmu, dold = self.xp, (0, self.x.rates.eta, self.x.rates.mu), None, ()
        if mu is not None:
            given = zip(self.state.slots[0], self.S, dS, dlast, strict=True)
            each = [running_vjp(xp, mu, first, y, d, last) for first, y, d, last in given]
            dmu, dold, dS = sum(y[0] for y in each), tuple(y[1] for y in each), tuple(y[2] for y in each)
        dfactors, deta, dshare = list[Any](), [0 * y for y in eta_of], None
        for p, (own_l, own_r) in enumerate(self.factors):
            (l, r), eta, d = self._factors_of(p), eta_of[self._eta(p)][..., None], dS[self.A.step * p]
            dl, dr = matmul(xp, r, xp.matrix_transpose(d)), matmul(xp, l, d)
            along = xp.sum(self._windows(own_l) * dl, axis=(-2, -1))[..., None]
            if self.A.step == 2:
                db = dS[2 * p + 1]
                along = along + xp.sum(r * db, axis=(-2, -1))[..., None]
                dr = dr - eta * db
            deta[self._eta(p)] = deta[self._eta(p)] - along
            dr = self._windows_vjp(dr)
            if (shares := self.rows.share) is not None:
                own = xp.sum(dr * own_r, axis=-1, keepdims=True)
                dshare, dr = own if dshare is None else dshare + own, shares * dr
            dfactors.append((self._windows_vjp(-eta * dl), dr))
        return dfactors, deta, dshare, dmu, dold

    # reading: a query has weights of its own

    def _before(self) -> Tree:
        """W_0 .. W_{n-1}."""
        each = zip(self.state.weights, self.W, strict=True)
        return tuple(self.xp.concat([w[..., None, :, :], y[..., :-1, :, :]], axis=-3) for w, y in each)

    def _reader(self) -> tuple[Shared, Tree]:
        """(the weights, the norm's weights)."""
        W, gain = self.W if self.f.read == "after" else self._before(), self.x.rates.gain
        R = mixed(self._anchors(), W, None if gain is None else gain[..., None])
        return self._shared(R), tuple(y[..., None, :, :] for y in self.slow)

    def _anchors(self) -> Tree:
        return tuple(y[..., None, :, :] for y in self.state.anchor)

    def read(self) -> Array:
        """The outputs."""
        return predict(self.f, *self._reader(), self.x.q[..., None, :])[0][..., 0, :]

    def _read_vjp(self, dout: Array) -> tuple[Array, Any, Any, Tree, Tree, Tree]:
        """(dq, cotangents of the gain, of A, of W_1 .. W_n and of W_0, of the norm)."""
        xp, (w, slow), gain = self.xp, self._reader(), self.x.rates.gain
        residuals = predict(self.f, w, slow, self.x.q[..., None, :])[1]
        dq, dslow = predict_vjp(self.f, w, slow, residuals, dout[..., None, :])
        W = self.W if self.f.read == "after" else self._before()
        dA, dW, dgain = mixed_vjp(xp, self._anchors(), W, None if gain is None else gain[..., None], w.d)
        dA = tuple(xp.sum(y, axis=-3) for y in dA) if gain is not None else tuple(0 * y for y in self.state.anchor)
        first = tuple(0 * y for y in self.state.weights)
        if self.f.read == "before":
            first = tuple(y[..., 0, :, :] for y in dW)
            dW = tuple(xp.concat([y[..., 1:, :, :], 0 * y[..., :1, :, :]], axis=-3) for y in dW)
        dgain = None if gain is None else dgain[..., 0]
        return dq[..., 0, :], dgain, dA, dW, first, tuple(xp.sum(y, axis=-3) for y in dslow)

    # the state after the tile

    def _before_close(self) -> State:
        slots = (tuple(S[..., -1, :, :] for S in self.S),) if self.x.rates.mu is not None else self.state.slots
        weights, past = tuple(W[..., -1, :, :] for W in self.W), after(self.f, self.rows, self.state.past)
        return State(self.last, self.state.anchor, weights, slots, None, past)

    def _last_gain(self) -> Any:
        return None if self.x.rates.gain is None else self.x.rates.gain[..., -1:, :]

    def end(self, initial: Tree) -> State:
        """The state after the tile."""
        found = self._before_close()
        if self.last % self.f.mini_batch:
            return found
        return close_fwd(self.xp, self.f, found, self._last_gain(), initial, False)[0]

    # the transpose

    def vjp(self, initial: Tree, dout: Any, d: State, has_end: bool) -> tuple[Tokens, State, Tree, Tree]:
        """(dx, dstate before the tile, dinitial, dslow)."""
        f, xp, x, rates = self.f, self.xp, self.x, self.x.rates
        dinitial, dslow, last_gain = (), tuple(0 * w for w in self.slow), None
        self.A = self._shared(self.state.anchor)  # without the gradients of another pullback
        if self.last % f.mini_batch == 0:
            d, last_gain, dinitial = close_vjp(xp, f, self._before_close(), self._last_gain(), initial, d)
        dq, dgain, dA, dW = None, None, d.anchor, tuple(0 * w for w in self.W)
        first = tuple(0 * y for y in self.state.weights)
        if dout is not None:
            dq, dgain, more, dW, first, own = self._read_vjp(dout)
            dA, dslow = plus(dA, more), plus(dslow, own) if own else dslow
        given = zip(self.state.weights, self.W, dW, d.weights, strict=True)
        each = [running_vjp(xp, rates.alpha, w, y, own, last) for w, y, own, last in given]
        dalpha = None if rates.alpha is None else sum(y[0] for y in each)
        dbefore, dD, dbeta = plus(first, [y[1] for y in each]), tuple(y[2] for y in each), None
        if rates.beta is not None:
            dbeta = sum(xp.sum(y * own, axis=(-2, -1))[..., None] for y, own in zip(dD, self.D, strict=True))
            dD = tuple(rates.beta[..., None] * y for y in dD)
        dS = directions_vjp(xp, self.muon, self.S, dD, self.inner)
        dfactors, deta, dshare, dmu, dold = self._momenta_vjp(dS, d.slots[0] if d.slots else ())
        dk, dv, more_slow = gradient_vjp(f, self.A, self.slow, self.rows.v, self.residuals, tuple(dfactors))
        own, dpast = rows_vjp(xp, f, Rows(dk, dv, dshare), d.past)
        if last_gain is not None:
            dgain = 0 * rates.gain if dgain is None else dgain
            dgain = xp.concat([dgain[..., :-1, :], dgain[..., -1:, :] + last_gain], axis=-2)
        found = Rates(tuple(deta), dalpha, dmu, dgain, dbeta, own.share)
        dx = filled(xp, Tokens(dq, own.k, own.v, found), x)
        slots = (dold,) if rates.mu is not None else d.slots
        state = State(self.state.n, plus(dA, self.A.d), dbefore, slots, None, dpast)
        return dx, state, dinitial, plus(dslow, more_slow)


def _muon_of(f: Learner) -> Any:
    """Muon or None."""
    return f.optimiser
