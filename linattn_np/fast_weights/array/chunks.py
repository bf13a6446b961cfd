"""The chunk (dual) form: tiles of a mini-batch in matrix products.

The gradients of a tile are taken at once, at the anchor A, as factors l_j^T r_j. With coefficients of the rates
(masks.py), weights that a query reads are never formed:

    x R_t = c_t x W + d_t x S + a_t x A - sum_j m_tj eta_j (x . l_j) r_j

for every product of the model (products.py). Its transpose goes back through reading, steps, gradient and rates.
Steps that are no sums of gradients are those of steps.py.
"""

from __future__ import annotations

from functools import reduce
from itertools import groupby
from math import prod
from typing import Any, NamedTuple

from ...ops.triangular import solve, solve_transposed, unit_lower
from ...runtime.arrays import Array, Namespace, device, keep_lower
from ..batches import close_fwd, close_vjp
from ..fused import appended, combined, matmul, stacked
from ..inner import gradient, gradient_vjp, predict, predict_vjp
from ..masks import coefficients, coefficients_vjp, names_of
from ..models import Factors, body_of
from ..products import Masked, Shared
from ..types import Learner, Rates, State, Tokens, Tree, added, filled, is_exact, joined, plus
from ..types import more as total
from .steps import Steps, tokens_of

TILE = 64  # tokens, where each reads weights of its own
MAX_RESIDUALS = 2**24  # numbers that a forward stores for its backward, beside states
MAX_STATES = 2**27  # numbers of the states before all tiles that are stored, or as many as tokens have
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

    Where states take more memory than tokens, those of every `_apart` tiles are kept, for the others None.
    has_end: the final state is wanted; else a last step that no query reads is left out.
    """
    every = _walk(f, xp, x, tiles(f, x.rates, begin.n, x.k.shape[-2], begin.anchor))
    out, residuals, apart = [], list[Any](), _apart(x, begin, len(every)) if keep else 1
    state, left = begin, MAX_RESIDUALS * (keep and apart == 1)
    for n, one in enumerate(every):
        tile = one.begun(state, slow, has_end)
        left -= tile.numbers
        tile.keep = left > 0
        out.append(None if x.q is None else tile.read())
        state = tile.end(initial)
        if keep:
            residuals.append(None if n % apart else (tile.state, tile.saved if tile.keep else None))
    whole = None if x.q is None or not out else appended(xp, out)
    return whole, [*residuals, state]


def _apart(x: Tokens, state: State, count: int) -> int:
    """How many tiles have one stored state: so many that as many states are stored as computed again at once."""
    size = sum(prod(w.shape) for tree in (state.weights, *state.slots) for w in tree)
    tokens = sum(prod(y.shape) for y in (x.k, x.k, x.v))
    return 1 if size * count <= max(tokens, MAX_STATES) else round(count**0.5)


def backward(
    f: Learner, xp: Namespace, x: Tokens, states: list[Any], initial: Tree, slow: Tree, dout: Any, d: State,
    has_end: bool = True,
) -> tuple[Tokens, State, Tree, Tree]:  # fmt: skip
    """(dx, dstate, dinitial, dslow) from the gradients of out and of the final state.

    has_end: the latter is not 0.
    """
    each, dinitial, dslow = list[Any](), tuple(0 * w for w in initial), tuple(0 * w for w in slow)
    every, kept = _walk(f, xp, x, tiles(f, x.rates, d.n - x.k.shape[-2], x.k.shape[-2], d.anchor)), [*states[:-1]]
    for n in reversed(range(len(every))):
        if kept[n] is None:
            kept[: n + 1] = _again(every[: n + 1], kept[: n + 1], initial, slow, has_end)
        state, saved = kept.pop()
        tile = every[n].begun(state, slow, has_end, saved)
        own = None if dout is None else dout[..., every[n].start : every[n].stop, :]
        found, d, more, more_slow = tile.vjp(initial, own, d, every[n].learns(has_end))
        each.append(found)
        dinitial, dslow = added(dinitial, more), plus(dslow, more_slow)
    return filled(xp, joined(xp, _finished(every, each[::-1]), x), x), d, dinitial, dslow


def _again(every: list[Place], kept: list[Any], initial: Tree, slow: Tree, has_end: bool) -> list[Any]:
    """kept with the states before the last tiles, computed once more from the last one that is stored."""
    first, left = max(n for n, one in enumerate(kept) if one is not None), MAX_RESIDUALS
    found, state = kept[:first], kept[first][0]
    for one in every[first:]:
        tile = one.begun(state, slow, has_end)
        left -= tile.numbers
        tile.keep = left > 0
        state = tile.end(initial)
        found.append((tile.state, tile.saved if tile.keep else None))
    return found


class Place(NamedTuple):
    """Tokens start..stop that are computed together, the first of which is the n-th of `tokens`."""

    f: Learner
    xp: Namespace
    x: Tokens
    start: int
    stop: int
    coefficients: Any = None  # of a run of tiles
    n: int = 0  # of that run

    def learns(self, has_end: bool) -> bool:
        """Whether the state after the tile is wanted."""
        return has_end or self.stop < self.x.k.shape[-2]

    def begun(self, state: State, slow: Tree, has_end: bool, saved: Any = None) -> Any:
        """The tile, with the state before it."""
        given = self.f, self.xp, self.x.cut(self.start, self.stop), state, slow, self.learns(has_end), saved
        return Steps(*given) if self.coefficients is None else Tile(*given, self.coefficients.at(self.n))


def _walk(f: Learner, xp: Namespace, x: Tokens, every: list[tuple[int, int]]) -> list[Place]:
    """The tiles of tokens; the coefficients of neighbours of one length are computed at once."""
    if not f.is_linear:
        return [Place(f, xp, x, a, b) for a, b in every]
    found: list[Place] = []
    for n, own in groupby(every, lambda ends: ends[1] - ends[0]):
        run = list(own)
        start, stop = run[0][0], run[-1][1]

        def cut(y: Array, start: int = start, stop: int = stop, count: int = len(run), n: int = n) -> Array:
            """(tiles, N, H, n, 1)."""
            y = xp.reshape(y[..., start:stop, :], (*y.shape[:2], count, n, y.shape[-1]))
            return xp.permute_dims(y, (2, 0, 1, 3, 4))

        made = Coefficients(f, xp, Tokens(None, None, None, x.rates).each(cut).rates, n, x.k)
        found += [Place(f, xp, x, a, b, made, i) for i, (a, b) in enumerate(run)]
    return found


def _finished(every: list[Place], each: list[Any]) -> list[Tokens]:
    """Gradients of tokens; those of the rates follow from those of the coefficients, at once for a run of tiles."""
    found: list[Tokens] = []
    for made, own in groupby(zip(every, each, strict=True), lambda pair: pair[0].coefficients):
        run = [one for _, one in own]
        found += run if made is None else [made.finished(run)]
    return found


class Found(NamedTuple):
    """Gradients of the tokens of a tile, or of a run: of their coefficients in place of their rates."""

    q: Any
    k: Any
    v: Any
    columns: list[Any]  # (..., rows, 1) of each base; not where they are sums
    masks: list[Any]  # (..., rows, n) of each step size
    mu: Any  # (..., 1, 1) of the sum of the tile's; None: no more
    gain: Any  # (..., 1, 1) of the last one


class Coefficients:
    """What the weights of n tokens are made of: of one tile, or of a run along the first axis."""

    def __init__(self, f: Learner, xp: Namespace, rates: Rates, n: int, like: Array) -> None:
        """rates (..., n, 1)."""
        # a step per token: rows for the queries, then for the end; else W' = W - sum eta_j G_j, and mu is for the end
        self.f, self.xp, self.n, self.given = f, xp, n, rates
        self.rates = rates if f.every == "token" else Rates(rates.eta)
        self.names = names_of(self.rates)
        self.is_sum = all(y is None for y in self.rates[1:])  # W' = W - sum eta_j G_j: the column of W is 1
        if f.every == "token":
            self.c, self.residuals = coefficients(xp, f, self.rates, n, like)
        else:
            own = rates.eta[0]
            self.c, self.residuals = xp.ones((1, 1 + n), dtype=own.dtype, device=device(own)), None
        self.masks = [-xp.matrix_transpose(eta) * self.c[..., len(self.names) :] for eta in rates.eta]

    def at(self, n: int) -> tuple[Coefficients, Array, list[Array]]:
        """(these, the coefficients of a tile of the run, its masks)."""
        return self, self.c if self.c.ndim == 2 else self.c[n, ...], [m[n, ...] for m in self.masks]

    def finished(self, run: list[Found]) -> Tokens:
        """Gradients of the tokens of a run of tiles, one after the other."""
        xp = self.xp
        if len(run) == 1:
            parts = run[0].columns, run[0].masks, run[0][5:]
            one = [[None if y is None else y[None, ...] for y in ys] for ys in parts]
        else:
            one = [self._stacked([d.columns for d in run]), self._stacked([d.masks for d in run]),
                   self._stacked([d[5:] for d in run])]  # fmt: skip
        rates = self.vjp(one[0], one[1], *one[2])

        def left(y: Array) -> Array:
            """(N, H, tiles n, 1)."""
            y = xp.permute_dims(y, (1, 2, 0, 3, 4))
            return xp.reshape(y, (*y.shape[:2], y.shape[2] * y.shape[3], y.shape[4]))

        q, k, v = (None if ys[0] is None else appended(xp, ys) for ys in zip(*(d[:3] for d in run), strict=True))
        return Tokens(q, k, v, Tokens(None, None, None, rates).each(left).rates)

    def _stacked(self, each: list[Any]) -> list[Any]:
        """Arrays of all tiles; None is 0, of all of them None."""
        xp, found = self.xp, list[Any]()
        for ys in zip(*each, strict=True):
            like = next((y for y in ys if y is not None), None)
            found.append(None if like is None else stacked(xp, [xp.zeros_like(like) if y is None else y for y in ys]))
        return found

    def vjp(self, columns: list[Any], dmasks: list[Any], last_mu: Any, last_gain: Any) -> Rates:
        """Gradients of the rates; without queries the first rows have none."""
        xp, B, eta, given, rows = self.xp, len(self.names), self.given.eta, self.given, self.c.shape[-2]
        deta, total = [], 0
        for n, d in enumerate(dmasks):
            d = _below(xp, d, rows)
            deta.append(-xp.matrix_transpose(xp.sum(d * self.c[..., B:], axis=-2, keepdims=True)))
            total = total - d * xp.matrix_transpose(eta[n])
        found = Rates(())
        if not self.is_sum:
            d = xp.concat([*(_below(xp, y, rows) for y in columns), total], axis=-1)
            found = coefficients_vjp(xp, self.f, self.rates, self.residuals, d)
        dmu, dgain = found.mu, found.gain
        if last_mu is not None:
            dmu = last_mu + xp.zeros_like(given.mu)
        if last_gain is not None:
            dgain = xp.zeros_like(given.gain) if dgain is None else dgain
            dgain = xp.concat([dgain[..., :-1, :], dgain[..., -1:, :] + last_gain], axis=-2)
        like = Tokens(None, None, None, given)
        d = Tokens(None, None, None, Rates(tuple(deta), found.alpha, dmu, dgain, found.beta))
        return filled(xp, d, like).rates


class Tile:
    """Tokens of one mini-batch, with the state before them. keep: arrays that the transpose reads are saved."""

    keep = False
    reading: Any = None
    closing: Any = None

    def __init__(
        self, f: Learner, xp: Namespace, x: Tokens, state: State, slow: Tree, learns: bool = True, saved: Any = None,
        made: Any = None,
    ) -> None:  # fmt: skip
        """learns: the state after the tile is wanted; it always is where queries read steps of the tile.

        saved: of the forward's tile. made: its coefficients; None: they are computed.
        """
        self.f, self.xp, self.x, self.state, self.slow = f, xp, x, state, slow
        self.n, self.last = x.k.shape[-2], state.n + x.k.shape[-2]
        self.A, P, self.is_exact = self._shared(state.anchor), body_of(f).matrices, is_exact(f, x.rates)
        self.learns = learns or f.every == "token"
        if not self.learns:
            self.reading = None if saved is None else saved["reading"]
        self.eta_of = [p * len(x.rates.eta) // P for p in range(P)]  # the step size of each matrix
        if made is None:
            own = Coefficients(f, xp, x.rates, self.n, x.k)
            made = own, own.c, own.masks
        self.coefficients, self.c, self.masks = made
        self.rates, self.names, self.is_sum = (getattr(self.coefficients, n) for n in ("rates", "names", "is_sum"))
        if not self.learns:
            return
        if saved is not None:
            vars(self).update(saved)
            return
        self.factors, self.residuals = self._solved() if self.is_exact else gradient(f, self.A, slow, x.k, x.v)

    @property
    def saved(self) -> dict[str, Any]:
        """What the transpose reads beside the state, as arrays."""
        names = ("factors", "residuals", "closing") if self.learns else ()
        return {n: getattr(self, n) for n in (*names, "reading")}

    @property
    def numbers(self) -> int:
        """About as many numbers are stored: some rows of each layer, and some matrices of iterations."""
        widths = sum(w.shape[-1] + w.shape[-2] for w in self.state.anchor)
        each = ITERATED * sum(w.shape[-1] * w.shape[-2] for w in self.state.anchor) if self.f.optimiser else 0
        return prod(self.x.k.shape[:-2]) * (ROWS_STORED * self.n * widths + each)

    def _shared(self, tree: Any) -> Shared:
        return Shared(self.xp, tree, body_of(self.f).matrices)

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
        KK, Z = matmul(xp, x.k, xp.matrix_transpose(x.k)), -x.v
        KK = KK + 1 if self.A.step == 2 else KK
        for n, tree in enumerate(self.bases.values()):
            Z = Z + self._points(self.c[..., n : n + 1]) * self._shared(tree).product(0, x.k)
        L = unit_lower(xp, keep_lower(xp, -self._points(self.masks[0]) * KK, strict=True))
        return ((x.k, solve(xp, L, Z)),), (KK, L)

    def _solved_vjp(self, dbases: list[Tree]) -> tuple[Any, Any, Any, Any, list[Tree]]:
        """(dk, dv, gradients of the points' columns, of their mask, of the bases)."""
        xp, (KK, L), ((k, r),), ((dl, dr),) = self.xp, self.residuals, self.factors, self.dfactors
        x, dc, found = solve_transposed(xp, L, dr), [], []
        E = keep_lower(xp, matmul(xp, x, xp.matrix_transpose(r)), strict=True)
        D = E * self._points(self.masks[0])
        dk = dl + matmul(xp, D + xp.matrix_transpose(D), k)
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
            found.append(matmul(xp, xp.matrix_transpose(l), r))
            if self.A.step == 2:
                found.append(xp.sum(r, axis=-2, keepdims=True))
        c = [self._column(n, row) for n in range(len(self.names))]
        if len(c) > 2:
            each = zip(found, *self.bases.values(), strict=True)
            found = [combined(xp, (y, *own[:2]), (None, *c[:2])) for y, *own in each]
            return tuple(combined(xp, (y, z), (None, c[2])) for y, z in zip(found, self.bases["A"], strict=True))
        return tuple(combined(xp, own, (None, *c)) for own in zip(found, *self.bases.values(), strict=True))

    # the transpose

    def vjp(self, initial: Tree, dout: Any, d: State, has_end: bool) -> tuple[Found, State, Tree, Tree]:
        """(gradients of the tokens, of the state before the tile, of the initial arrays, of the norm)."""
        f, xp, x = self.f, self.xp, self.x
        dinitial, dslow, last_gain = (), tuple(0 * w for w in self.slow), None
        self.A = self._shared(self.state.anchor)  # without the gradients of another pullback
        if not has_end and f.every != "token":
            dq, dA = None, d.anchor
            if dout is not None:
                _, dq, dslow = self._read_vjp(dout)
                dA = plus(dA, self.A.d)
            zero = [xp.zeros_like(m) for m in self.masks]
            sums = None if d.sums is None else 0 * d.sums
            dx = Found(dq, xp.zeros_like(x.k), xp.zeros_like(x.v), [], zero, sums, None)
            return dx, d._replace(n=self.state.n, anchor=dA), dinitial, dslow
        if self.last % f.mini_batch == 0:
            after, residuals = self.closing or (self.before_close(), None)
            d, last_gain, dinitial = close_vjp(xp, f, after, self._last_gain(), initial, d, residuals)
        P, dq = len(self.factors), None
        self.dfactors: list[Any] = [(None, None)] * P
        dc, dmasks, dbases = self._ends_vjp(d)
        if dout is not None:
            w, dq, more = self._read_vjp(dout)
            dslow = plus(dslow, more)
            if f.every == "token":
                both = zip(self.dfactors, w.dfactors, strict=True)
                self.dfactors = [(total(a, c), total(b, e)) for (a, b), (c, e) in both]
                dbases = [plus(y, own.d) for y, own in zip(dbases, w.bases, strict=True)]
                dc, dmasks = [w.dc, *dc], [w.dmasks, *dmasks]
        if self.is_exact:
            dk, dv, own_c, own_masks, dbases = self._solved_vjp(dbases)
            dc, dmasks, more, dA = [*dc, own_c], [*dmasks, own_masks], dslow, d.anchor
        else:
            dk, dv, more = gradient_vjp(f, self.A, self.slow, x.v, self.residuals, tuple(self.dfactors))
            dA = plus(d.anchor, self.A.d)
        dslow, by = plus(dslow, more), dict(zip(self.names, dbases, strict=True))
        dA = plus(dA, by["A"]) if "A" in by else dA
        columns = [] if self.is_sum else [xp.concat([own[n] for own in dc], axis=-2) for n in range(len(self.names))]
        each = [[_sum([y for p, y in enumerate(own) if self.eta_of[p] == n]) for own in dmasks]
                for n in range(len(x.rates.eta))]  # fmt: skip
        dmasks = [own[0] if len(own) == 1 else xp.concat(own, axis=-2) for own in each]
        dx = Found(dq, dk, dv, columns, dmasks, d.sums, last_gain)
        slots = (by["S"],) if "S" in by else d.slots
        return dx, State(self.state.n, dA, by["W"], slots, d.sums), dinitial, dslow

    def finished(self, d: Found) -> Tokens:
        """Gradients of the tokens, of one tile alone."""
        return Tokens(*d[:3], self.coefficients.vjp(*d[3:]))

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
                to_r = matmul(xp, l, dW)
                to_r = to_r + own[2 * p + 1] if self.A.step == 2 else to_r
                dl, dr = self.dfactors[p]
                self.dfactors[p] = total(dl, m * matmul(xp, r, xp.matrix_transpose(dW))), total(dr, m * to_r)
                found.append(xp.matrix_transpose(xp.sum(to_r * r, axis=-1, keepdims=True)))
            dmasks.append(found)
        return dc, dmasks, dbases


def _sum(each: list[Any]) -> Any:
    return reduce(total, each)


def _below(xp: Namespace, y: Array, rows: int) -> Array:
    """y below so many zeros that there are `rows` rows."""
    if not (left := rows - y.shape[-2]):
        return y
    return xp.concat([xp.zeros((*y.shape[:-2], left, y.shape[-1]), dtype=y.dtype, device=device(y)), y], axis=-2)


def _dots(xp: Namespace, x: Tree, y: Tree) -> Array:
    """sum <x, y>, (..., H, 1, 1)."""
    total: Any = 0
    for a, b in zip(x, y, strict=True):
        total = total + xp.sum(a * b, axis=(-2, -1), keepdims=True)
    return total
