"""The chunk (dual) form: tiles of a mini-batch in matrix products.

The gradients of a tile are taken at once, at the anchor A, as factors l_j^T r_j. With coefficients of the rates
(masks.py), weights that a query reads are never formed:

    x R_t = c_t x W + d_t x S + a_t x A - sum_j m_tj eta_j (x . l_j) r_j

for every product of the model (products.py). Its transpose goes back through reading, steps, gradient and rates.
Steps that are no sums of gradients are those of steps.py.
"""

from __future__ import annotations

from math import prod
from typing import Any

from ...ops.triangular import solve, solve_transposed, unit_lower
from ...runtime.arrays import Array, Namespace, device, keep_lower
from ..batches import close_fwd, close_vjp
from ..inner import gradient, gradient_vjp, predict, predict_vjp
from ..masks import coefficients, coefficients_vjp, names_of
from ..models import Factors, body_of
from ..products import Masked, Shared
from ..types import Learner, Rates, State, Tokens, Tree, filled, is_exact, joined, plus
from .steps import Steps, tokens_of

TILE = 64  # tokens, where each reads weights of its own
MAX_RESIDUALS = 2**24  # numbers that a forward stores for its backward, beside states
ROWS_STORED, ITERATED = 2, 24  # arrays of a layer's width and numbers of iterations for each of a matrix, about


def tiles(f: Learner, rates: Rates, n: int, T: int, anchor: Tree) -> list[tuple[int, int]]:
    """(start, stop) of the tiles of T tokens after n: none crosses the end of a mini-batch, unless it is solved."""
    found, t, most = [], 0, f.tile or (TILE if f.is_linear else min(TILE, tokens_of(anchor)))
    if is_exact(f, rates):
        return [(t, min(t + most, T)) for t in range(0, T, most)]
    while t < T:
        left = f.mini_batch - (n + t) % f.mini_batch
        stop = min(T, t + (min(left, most) if f.every == "token" or f.tile else left))
        found.append((t, stop))
        t = stop
    return found


def forward(
    f: Learner, xp: Namespace, x: Tokens, begin: State, initial: Tree, slow: Tree, keep: bool, has_end: bool = True
) -> tuple[Any, list[Any]]:
    """(out, the final state; keep: for each tile (the state before it, its arrays or None), and the final state).

    has_end: the final state is wanted; else a last step that no query reads is left out.
    """
    state, out, residuals, left = begin, [], list[Any](), MAX_RESIDUALS * keep
    of = Tile if f.is_linear else Steps
    for a, b in tiles(f, x.rates, begin.n, x.k.shape[-2], begin.anchor):
        tile = of(f, xp, x.cut(a, b), state, slow, has_end or b < x.k.shape[-2])
        left -= tile.numbers
        tile.keep = left > 0
        out.append(None if x.q is None else tile.read())
        state = tile.end(initial)
        if keep:
            residuals.append((tile.state, tile.saved if tile.keep else None))
    return None if x.q is None or not out else xp.concat(out, axis=-2), [*residuals, state]


def backward(
    f: Learner, xp: Namespace, x: Tokens, states: list[Any], initial: Tree, slow: Tree, dout: Any, d: State,
    has_end: bool = True,
) -> tuple[Tokens, State, Tree, Tree]:  # fmt: skip
    """(dx, dstate, dinitial, dslow) from the gradients of out and of the final state.

    has_end: the latter is not 0.
    """
    each, dinitial, dslow = [], tuple(0 * w for w in initial), tuple(0 * w for w in slow)
    every, of = tiles(f, x.rates, d.n - x.k.shape[-2], x.k.shape[-2], d.anchor), Tile if f.is_linear else Steps
    for (a, b), (state, saved) in zip(reversed(every), reversed(states[:-1]), strict=True):
        learns = has_end or b < x.k.shape[-2]
        tile = of(f, xp, x.cut(a, b), state, slow, learns, saved)
        dx, d, more, more_slow = tile.vjp(initial, None if dout is None else dout[..., a:b, :], d, learns)
        each.append(dx)
        dinitial, dslow = plus(dinitial, more), plus(dslow, more_slow)
    return joined(xp, each[::-1], x), d, dinitial, dslow


class Tile:
    """Tokens of one mini-batch, with the state before them. keep: arrays that the transpose reads are saved."""

    keep = False
    reading: Any = None
    closing: Any = None

    def __init__(
        self, f: Learner, xp: Namespace, x: Tokens, state: State, slow: Tree, learns: bool = True, saved: Any = None
    ) -> None:
        """learns: the state after the tile is wanted; it always is where queries read steps of the tile.

        saved: of the forward's tile.
        """
        self.f, self.xp, self.x, self.state, self.slow = f, xp, x, state, slow
        self.n, self.last = x.k.shape[-2], state.n + x.k.shape[-2]
        self.A, P, self.is_exact = self._shared(state.anchor), body_of(f).matrices, is_exact(f, x.rates)
        self.learns = learns or f.every == "token"
        if not self.learns:
            self.reading = None if saved is None else saved["reading"]
            return
        self.eta_of = [p * len(x.rates.eta) // P for p in range(P)]  # the step size of each matrix
        # a step per token: rows for the queries, then for the end; else W' = W - sum eta_j G_j, and mu is for the end
        self.rates = x.rates if f.every == "token" else Rates(x.rates.eta)
        self.names = names_of(self.rates)
        self.is_sum = all(y is None for y in self.rates[1:])  # W' = W - sum eta_j G_j: the column of W is 1
        if saved is not None:
            vars(self).update(saved)
            return
        self.c, self.steps_residuals = self._coefficients()
        self.masks = [-xp.matrix_transpose(eta) * self.c[..., len(self.names) :] for eta in x.rates.eta]
        self.factors, self.residuals = self._solved() if self.is_exact else gradient(f, self.A, slow, x.k, x.v)

    @property
    def saved(self) -> dict[str, Any]:
        """What the transpose reads beside the state, as arrays."""
        names = ("c", "steps_residuals", "masks", "factors", "residuals", "closing") if self.learns else ()
        return {n: getattr(self, n) for n in (*names, "reading")}

    @property
    def numbers(self) -> int:
        """About as many numbers are stored: some rows of each layer, and some matrices of iterations."""
        widths = sum(w.shape[-1] + w.shape[-2] for w in self.state.anchor)
        each = ITERATED * sum(w.shape[-1] * w.shape[-2] for w in self.state.anchor) if self.f.optimiser else 0
        return prod(self.x.k.shape[:-2]) * (ROWS_STORED * self.n * widths + each)

    def _shared(self, tree: Any) -> Shared:
        return Shared(self.xp, tree, body_of(self.f).matrices)

    def _coefficients(self) -> tuple[Array, Any]:
        if self.f.every == "token":
            return coefficients(self.xp, self.f, self.rates, self.n, self.x.k)
        like = self.x.rates.eta[0]
        return self.xp.ones((1, 1 + self.n), dtype=like.dtype, device=device(like)), None

    @property
    def bases(self) -> dict[str, Any]:
        """What the columns of the coefficients belong to."""
        slots = self.state.slots[0] if self.state.slots else None
        trees = {"W": self.state.weights, "S": slots, "A": self.state.anchor}
        return {name: trees[name] for name in self.names}

    def _column(self, n: int, rows: slice) -> Array | None:
        """The coefficients of base n; None: 1."""
        return None if self.is_sum else self.c[..., rows, n : n + 1]

    def _times(self, n: int, row: slice, tree: Any) -> Tree:
        """c_n B of one row."""
        c = self._column(n, row)
        return tuple(tree) if c is None else tuple(c * y for y in tree)

    # gradients at the weights before each token: (I - m * K K^T) R = K (c W + d S) - V, m strictly lower

    def _points(self, y: Array) -> Array:
        return y[..., -self.n :, :]

    def _solved(self) -> tuple[Factors, Any]:
        """(the factors, residuals) from one triangular system."""
        xp, x = self.xp, self.x
        KK, Z = xp.matmul(x.k, xp.matrix_transpose(x.k)), -x.v
        KK = KK + 1 if self.A.step == 2 else KK
        for n, tree in enumerate(self.bases.values()):
            Z = Z + self._points(self.c[..., n : n + 1]) * self._shared(tree).product(0, x.k)
        L = unit_lower(xp, keep_lower(xp, -self._points(self.masks[0]) * KK, strict=True))
        return ((x.k, solve(xp, L, Z)),), (KK, L)

    def _solved_vjp(self, dbases: list[Tree]) -> tuple[Any, Any, Any, Any, list[Tree]]:
        """(dk, dv, gradients of the points' columns, of their mask, of the bases)."""
        xp, (KK, L), ((k, r),), ((dl, dr),) = self.xp, self.residuals, self.factors, self.dfactors
        x, dc, found = solve_transposed(xp, L, dr), [], []
        E = keep_lower(xp, xp.matmul(x, xp.matrix_transpose(r)), strict=True)
        D = E * self._points(self.masks[0])
        dk = dl + xp.matmul(D + xp.matrix_transpose(D), k)
        for n, (tree, d) in enumerate(zip(self.bases.values(), dbases, strict=True)):
            base, own = self._shared(tree), self._points(self.c[..., n : n + 1]) * x
            dc.append(xp.sum(x * base.product(0, k), axis=-1, keepdims=True))
            base.add(0, k, own)
            dk = dk + base.transposed(0, own)
            found.append(plus(d, base.d))
        return dk, -x, dc, [E * KK], found

    # reading

    def _weights(self) -> Any:
        """The weights that queries read, which collect their gradients."""
        if self.f.every != "token":
            return self.A
        rows = slice(0, self.n)
        masks = [self.masks[n][..., rows, :] for n in self.eta_of]
        c = [self._column(n, rows) for n in range(len(self.names))]
        return Masked([self._shared(tree) for tree in self.bases.values()], c, masks, self.factors)

    def read(self) -> Array:
        """The outputs."""
        out, residuals = predict(self.f, self._weights(), self.slow, self.x.q)
        self.reading = residuals if self.keep else None
        return out

    def _read_vjp(self, dout: Array) -> tuple[Any, Array, Tree]:
        """(the weights with their gradients, dq, dslow)."""
        w = self._weights()
        residuals = self.reading or predict(self.f, w, self.slow, self.x.q)[1]
        return w, *predict_vjp(self.f, w, self.slow, residuals, dout)

    # the state after the tile

    @property
    def ends(self) -> tuple[slice, ...]:
        """The rows of the last weights, and of the last momentum."""
        first = self.n if self.f.every == "token" else 0
        return tuple(slice(n, n + 1) for n in range(first, first + 1 + (self.rates.mu is not None)))

    def before_close(self) -> State:
        """The state after the last token, before the mini-batch ends."""
        sums, mu = self.state.sums, self.x.rates.mu
        if sums is not None:
            sums = sums + self.xp.sum(mu, axis=-2, keepdims=True)
        weights, *more = [self._combined(row) for row in self.ends]
        slots = tuple(more) if self.rates.mu is not None else self.state.slots
        return State(self.last, self.state.anchor, weights, slots, sums)

    def end(self, initial: Tree) -> State:
        """The state after the tile, or before it if it is not wanted."""
        if not self.learns:
            return self.state
        after = self.before_close()
        if self.last % self.f.mini_batch:
            return after
        closed, residuals = close_fwd(self.xp, self.f, after, self._last_gain(), initial, self.keep)
        self.closing = (after, residuals) if self.keep else None
        return closed

    def _last_gain(self) -> Any:
        return None if self.x.rates.gain is None else self.x.rates.gain[..., -1:, :]

    def _combined(self, row: slice) -> Tree:
        """sum_n c_n B_n + sum_j m_j l_j^T r_j, and for biases sum_j m_j r_j."""
        xp, found = self.xp, []
        for p, (l, r) in enumerate(self.factors):
            r = xp.matrix_transpose(self.masks[self.eta_of[p]][..., row, :]) * r
            found.append(xp.matmul(xp.matrix_transpose(l), r))
            if self.A.step == 2:
                found.append(xp.sum(r, axis=-2, keepdims=True))
        total = tuple(found)
        for n, tree in enumerate(self.bases.values()):
            total = plus(total, self._times(n, row, tree))
        return total

    # the transpose

    def vjp(self, initial: Tree, dout: Any, d: State, has_end: bool) -> tuple[Tokens, State, Tree, Tree]:
        """(dx, dstate before the tile, dinitial, dslow)."""
        f, xp, x = self.f, self.xp, self.x
        dinitial, dslow, last_gain = tuple(0 * w for w in initial), tuple(0 * w for w in self.slow), None
        self.A = self._shared(self.state.anchor)  # without the gradients of another pullback
        if not has_end and f.every != "token":
            dq, dA = None, d.anchor
            if dout is not None:
                _, dq, dslow = self._read_vjp(dout)
                dA = plus(dA, self.A.d)
            dx = filled(xp, Tokens(dq, None, None, Rates((None,) * len(x.rates.eta))), x)
            return dx, d._replace(n=self.state.n, anchor=dA), dinitial, dslow
        if self.last % f.mini_batch == 0:
            after, residuals = self.closing or (self.before_close(), None)
            d, last_gain, dinitial = close_vjp(xp, f, after, self._last_gain(), initial, d, residuals)
        P, dq = len(self.factors), None
        self.dfactors: list[Any] = [(0, 0)] * P
        dc, dmasks, dbases = self._ends_vjp(d)
        if dout is not None:
            w, dq, more = self._read_vjp(dout)
            dslow = plus(dslow, more)
            if f.every == "token":
                self.dfactors = [(a + c, b + e) for (a, b), (c, e) in zip(self.dfactors, w.dfactors, strict=True)]
                dbases = [plus(y, own.d) for y, own in zip(dbases, w.bases, strict=True)]
                dc, dmasks = [w.dc, *dc], [w.dmasks, *dmasks]
        if self.is_exact:
            dk, dv, own_c, own_masks, dbases = self._solved_vjp(dbases)
            dc, dmasks, more, dA = [*dc, own_c], [*dmasks, own_masks], dslow, d.anchor
        else:
            dk, dv, more = gradient_vjp(f, self.A, self.slow, x.v, self.residuals, tuple(self.dfactors))
            dA = plus(d.anchor, self.A.d)
        deta, rates = self._rates_vjp(dc, dmasks)
        dslow, by = plus(dslow, more), dict(zip(self.names, dbases, strict=True))
        dA = plus(dA, by["A"]) if "A" in by else dA
        dalpha, dmu, dgain, dbeta = rates.alpha, rates.mu, rates.gain, rates.beta
        if d.sums is not None:
            dmu = d.sums + xp.zeros_like(x.rates.mu)
        if last_gain is not None:
            dgain = xp.zeros_like(x.rates.gain) if dgain is None else dgain
            dgain = xp.concat([dgain[..., :-1, :], dgain[..., -1:, :] + last_gain], axis=-2)
        dx = filled(xp, Tokens(dq, dk, dv, Rates(deta, dalpha, dmu, dgain, dbeta)), x)
        slots = (by["S"],) if "S" in by else d.slots
        return dx, State(self.state.n, dA, by["W"], slots, d.sums), dinitial, dslow

    def _ends_vjp(self, d: State) -> tuple[list[Any], list[Any], list[Tree]]:
        """(gradients of the columns of each last row, of its masks, of the bases); those of factors are added."""
        xp, dc, dmasks, dbases = self.xp, [], [], list[Tree]()
        for row, own in zip(self.ends, (d.weights, *d.slots), strict=False):
            dc.append([] if self.is_sum else [_dots(xp, own, tree) for tree in self.bases.values()])
            each = [self._times(n, row, own) for n in range(len(self.names))]
            dbases = [plus(y, z) for y, z in zip(dbases, each, strict=True)] if dbases else each
            found = []
            for p, (l, r) in enumerate(self.factors):
                m, dW = xp.matrix_transpose(self.masks[self.eta_of[p]][..., row, :]), own[self.A.step * p]
                to_r = xp.matmul(l, dW)
                to_r = to_r + own[2 * p + 1] if self.A.step == 2 else to_r
                dl, dr = self.dfactors[p]
                self.dfactors[p] = dl + m * xp.matmul(r, xp.matrix_transpose(dW)), dr + m * to_r
                found.append(xp.matrix_transpose(xp.sum(to_r * r, axis=-1, keepdims=True)))
            dmasks.append(found)
        return dc, dmasks, dbases

    def _rates_vjp(self, dc: list[Any], dmasks: list[Any]) -> tuple[tuple[Any, ...], Rates]:
        """(gradients of the step sizes, of the other rates); without queries the first rows have none."""
        xp, B, eta = self.xp, len(self.names), self.x.rates.eta
        rows, total = self.c.shape[-2], 0
        deta = []
        for n in range(len(eta)):
            each = [sum(y for p, y in enumerate(own) if self.eta_of[p] == n) for own in dmasks]
            d = _below(xp, each, rows)
            deta.append(-xp.matrix_transpose(xp.sum(d * self.c[..., B:], axis=-2, keepdims=True)))
            total = total - d * xp.matrix_transpose(eta[n])
        if all(y is None for y in self.rates[1:]):
            return tuple(deta), Rates(())
        columns = [_below(xp, [own[n] for own in dc], rows) for n in range(B)]
        d = xp.concat([*columns, total], axis=-1)
        return tuple(deta), coefficients_vjp(xp, self.f, self.rates, self.steps_residuals, d)


def _below(xp: Namespace, each: list[Array], rows: int) -> Array:
    """Rows one below the other, zeros before them."""
    y = xp.concat(each, axis=-2)
    left = rows - y.shape[-2]
    return (
        xp.concat([xp.zeros((*y.shape[:-2], left, y.shape[-1]), dtype=y.dtype, device=device(y)), y], axis=-2)
        if left
        else y
    )


def _dots(xp: Namespace, x: Tree, y: Tree) -> Array:
    """sum <x, y>, (..., H, 1, 1)."""
    total: Any = 0
    for a, b in zip(x, y, strict=True):
        total = total + xp.sum(a * b, axis=(-2, -1), keepdims=True)
    return total
