"""The only place that knows the kind of decay. Everything is one chunk of C tokens; arrays are (..., C, D).

With e^{g} the decay of one token, s(j, i) = g_{j+1} + ... + g_i is the log decay from j to i, and

    gram(x, y)_ij = sum_d x_id y_jd e^{s(j, i)_d}          what reader i finds of writer j, in the chunk
    rows(P, y)_i  = sum_j P_ij y_j e^{s(j, i)}             gram's transpose in x
    cols(P, x)_j  = sum_i P_ij x_i e^{s(j, i)}             gram's transpose in y
    from_start(x)_i = x_i e^{s(start, i)}                  what reader i finds of the incoming state
    to_end(y)_j   = y_j e^{s(j, end)}                      what of writer j is left at the end
    carry(S)      = diag(e^{s(start, end)}) S              what of the state is left at the end

A reader's row says how far the decay reaches: AFTER and DECAYED to i, BEFORE to i - 1; DECAYED and BEFORE leave
j = i out. Every sum s is formed by adding its own terms, never as a difference of two long sums: exponents are <= 0
whenever g is, nothing cancels, and g = -inf is just a term. Each f_vjp also returns the gradient of g, again as sums
of its own terms: g_t collects every product whose path from j to i crosses t. docs/one_core.md derives both.
"""

from __future__ import annotations

from ..ground.namespace import Array, Namespace, cast, device, sum_dtype
from .kinds import Row

GATE_FLOOR = -1.0e4  # e^{-1e4} is 0 in every dtype: a log decay below it means the same as -inf
BLOCK = 16  # tokens whose pairs are formed channel by channel (VECTOR)


def decay_of(xp: Namespace, g: Array | None, dtype: object) -> NoDecay:
    """The decay of one chunk from its log decays: None, (..., C, 1) or (..., C, K)."""
    if g is None:
        return NoDecay(xp)
    return (ScalarDecay if g.shape[-1] == 1 else VectorDecay)(xp, g, dtype)


class NoDecay:
    """e^{s} = 1."""

    def __init__(self, xp: Namespace):
        self.xp = xp

    def gram(self, x: Array, y: Array, row: Row) -> Array:
        return self.xp.tril(x @ self.xp.matrix_transpose(y), k=-1 if row.strict else 0)

    def rows(self, P: Array, y: Array, row: Row) -> Array:
        return P @ y

    def cols(self, P: Array, x: Array, row: Row) -> Array:
        return self.xp.matrix_transpose(P) @ x

    def gram_vjp(self, P: Array, x: Array, y: Array, row: Row) -> tuple[Array, Array, Array | None]:
        """(dx, dy, dg) for the cotangent P of gram(x, y, row)."""
        P = self.xp.tril(P, k=-1 if row.strict else 0)
        return P @ y, self.xp.matrix_transpose(P) @ x, None

    def from_start(self, x: Array, row: Row) -> Array:
        return x

    def from_start_vjp(self, x: Array, dy: Array, row: Row) -> tuple[Array, Array | None]:
        return dy, None

    def to_end(self, y: Array) -> Array:
        return y

    def to_end_vjp(self, y: Array, dy: Array) -> tuple[Array, Array | None]:
        return dy, None

    def carry(self, S: Array) -> Array:
        return S

    def carry_vjp(self, S: Array, dS: Array) -> tuple[Array, Array | None]:
        return dS, None

    def weight(self) -> Array | None:
        """e^{s(start, end)} as a row (..., 1, D); None where it is 1."""
        return None

    def spread(self, crossed: Array) -> Array | None:
        """Gradient of g from products (..., 1, D) whose paths cross the whole chunk: the same for every token."""
        return None


class ScalarDecay(NoDecay):
    """One log decay a token: g (..., C, 1)."""

    def __init__(self, xp: Namespace, g: Array, dtype: object):
        super().__init__(xp)
        self.dtype = dtype
        floor = xp.asarray(GATE_FLOOR, dtype=g.dtype, device=device(g))
        self.g = cast(xp, xp.maximum(g, floor), sum_dtype(xp, g))
        self.tables: dict[object, Array] = {}

    # tables of e^{s}, made when first asked for

    def table(self, name: object) -> Array:
        if name not in self.tables:
            self.tables[name] = self._pairs(name) if isinstance(name, Row) else self._exp(self._sums(str(name)))
        return self.tables[name]

    def _exp(self, s: Array) -> Array:
        return self.xp.exp(cast(self.xp, s, self.dtype))

    def _sums(self, name: str) -> Array:
        xp, g = self.xp, self.g
        if name == "start":  # s(start, i)
            return prefix(xp, g)
        if name == "start before":  # s(start, i - 1)
            return before(xp, g)
        if name == "end":  # s(j, end)
            return after(xp, g)
        return xp.sum(g, axis=-2, keepdims=True)  # "all": s(start, end)

    def _pairs(self, row: Row) -> Array:
        """e^{s(j, i)}, 0 above the diagonal: (..., C, C)."""
        xp = self.xp
        if row is Row.DECAYED:
            return xp.tril(self.table(Row.AFTER), k=-1)
        if row is Row.BEFORE:
            return down(xp, self.table(Row.AFTER))
        C = self.g.shape[-2]
        terms = xp.tril(xp.broadcast_to(self.g, (*self.g.shape[:-1], C)), k=-1)  # g_l where l > j
        return xp.tril(self._exp(xp.cumulative_sum(terms, axis=-2)))

    # the four functions and their transposes

    def gram(self, x: Array, y: Array, row: Row) -> Array:
        return (x @ self.xp.matrix_transpose(y)) * self.table(row)

    def rows(self, P: Array, y: Array, row: Row) -> Array:
        return (P * self.table(row)) @ y

    def cols(self, P: Array, x: Array, row: Row) -> Array:
        return self.xp.matrix_transpose(P * self.table(row)) @ x

    def gram_vjp(self, P: Array, x: Array, y: Array, row: Row) -> tuple[Array, Array, Array | None]:
        PE = P * self.table(row)
        W = PE * (x @ self.xp.matrix_transpose(y))
        dg = crossing(self.xp, up(self.xp, W) if row is Row.BEFORE else W)
        return PE @ y, self.xp.matrix_transpose(PE) @ x, dg

    def from_start(self, x: Array, row: Row) -> Array:
        return x * self.table("start before" if row is Row.BEFORE else "start")

    def from_start_vjp(self, x: Array, dy: Array, row: Row) -> tuple[Array, Array | None]:
        dx = self.from_start(dy, row)
        crossed = after if row is Row.BEFORE else suffix  # g_t lies on the path to i when i > t, or i >= t
        return dx, crossed(self.xp, self._fit(x * dx))

    def to_end(self, y: Array) -> Array:
        return y * self.table("end")

    def to_end_vjp(self, y: Array, dy: Array) -> tuple[Array, Array | None]:
        d = self.to_end(dy)
        return d, before(self.xp, self._fit(y * d))  # g_t lies on the path from j when j < t

    def carry(self, S: Array) -> Array:
        return S * self.xp.matrix_transpose(self.table("all"))

    def carry_vjp(self, S: Array, dS: Array) -> tuple[Array, Array | None]:
        d = self.carry(dS)
        return d, self.spread(self.xp.matrix_transpose(self.xp.sum(S * d, axis=-1, keepdims=True)))

    def weight(self) -> Array | None:
        return self.table("all")

    def spread(self, crossed: Array) -> Array | None:
        crossed = self._fit(crossed)
        return self.xp.broadcast_to(crossed, (*crossed.shape[:-2], self.g.shape[-2], crossed.shape[-1]))

    def _fit(self, x: Array) -> Array:
        """Sum of the products of a token over the channels that share its g."""
        return self.xp.sum(x, axis=-1, keepdims=True)


class VectorDecay(ScalarDecay):
    """One log decay a token and channel: g (..., C, K).

    A pair (i, j) of different blocks of 16 is split at the first row of i's block: x_i e^{s(block start, i)} times
    y_j e^{s(j, block start)}, two factors <= 1, so that the block is one product. Pairs of one block are formed
    channel by channel: (..., 16, 16, K).
    """

    def _fit(self, x: Array) -> Array:
        return x

    def blocks(self) -> list[tuple[int, int]]:
        C = self.g.shape[-2]
        return [(s, min(s + BLOCK, C)) for s in range(0, C, BLOCK)]

    def _pairs(self, row: Row) -> Array:
        raise AssertionError("pairs of a vector decay exist block by block only")

    def table(self, name: object) -> Array:
        if name not in self.tables and isinstance(name, tuple):
            kind, s, e = name
            g = self.g[..., s:e, :]
            if kind is Row.BEFORE:
                made = self._exp(before(self.xp, g))  # e^{s(s, i - 1)}
            elif kind is Row.AFTER or kind is Row.DECAYED:
                made = self._exp(prefix(self.xp, g))  # e^{s(s, i)}
            elif kind == "reach":
                made = self._exp(after(self.xp, self.g[..., :s, :]))  # e^{s(j, s)} for every j < s
            else:
                made = self._block_pairs(kind[1], g)
            self.tables[name] = made
        return super().table(name)

    def _block_pairs(self, row: Row, g: Array) -> Array:
        """e^{s(j, i)} inside a block, 0 where j is not read: (..., c, c, K)."""
        xp, c = self.xp, g.shape[-2]
        lower = xp.tril(xp.ones((c, c), dtype=g.dtype, device=device(g)), k=-1)[:, :, None]
        s = xp.cumulative_sum(g[..., :, None, :] * lower, axis=-3)
        E = self._exp(s) * cast(xp, xp.tril(xp.ones((c, c), dtype=g.dtype, device=device(g)))[:, :, None], self.dtype)
        if row is Row.DECAYED:
            E = E * cast(xp, lower, self.dtype)
        if row is Row.BEFORE:
            E = xp.concat([xp.zeros_like(E[..., :1, :, :]), E[..., :-1, :, :]], axis=-3)
        return E

    def gram(self, x: Array, y: Array, row: Row) -> Array:
        xp, C, out = self.xp, self.g.shape[-2], []
        for s, e in self.blocks():
            xs = x[..., s:e, :]
            E = self.table((("pairs", row), s, e))
            parts = [((E * y[..., None, s:e, :]) @ xs[..., :, :, None])[..., 0]]  # sum_d x_id y_jd E_ijd
            if s:
                head, reach = self.table((row, s, e)), self.table(("reach", s, e))
                parts.insert(0, (xs * head) @ xp.matrix_transpose(y[..., :s, :] * reach))
            if e < C:
                like = parts[-1]
                parts.append(xp.zeros((*like.shape[:-1], C - e), dtype=like.dtype, device=device(like)))
            out.append(xp.concat(parts, axis=-1))
        return xp.concat(out, axis=-2)

    def rows(self, P: Array, y: Array, row: Row) -> Array:
        xp, out = self.xp, []
        for s, e in self.blocks():
            E = self.table((("pairs", row), s, e))
            part = (P[..., s:e, None, s:e] @ (E * y[..., None, s:e, :]))[..., 0, :]
            if s:
                part = part + (P[..., s:e, :s] @ (y[..., :s, :] * self.table(("reach", s, e)))) * self.table((row, s, e))
            out.append(part)
        return xp.concat(out, axis=-2)

    def cols(self, P: Array, x: Array, row: Row) -> Array:
        xp, C, out = self.xp, self.g.shape[-2], 0.0
        for s, e in self.blocks():
            E = self.table((("pairs", row), s, e))
            own = xp.sum(P[..., s:e, s:e, None] * E * x[..., s:e, None, :], axis=-3)
            parts = [own]
            if s:
                reached = xp.matrix_transpose(P[..., s:e, :s]) @ (x[..., s:e, :] * self.table((row, s, e)))
                parts.insert(0, reached * self.table(("reach", s, e)))
            out = out + _rows_of(xp, parts, C)
        return out

    def gram_vjp(self, P: Array, x: Array, y: Array, row: Row) -> tuple[Array, Array, Array | None]:
        xp, C = self.xp, self.g.shape[-2]
        dx, dy, dg = [], 0.0, 0.0
        for s, e in self.blocks():
            xs, ys, E = x[..., s:e, :], y[..., s:e, :], self.table((("pairs", row), s, e))
            PE = P[..., s:e, s:e, None] * E  # (..., c, c, K)
            Ey = PE * ys[..., None, :, :]
            dxs = xp.sum(Ey, axis=-2)
            dys = [xp.sum(PE * xs[..., :, None, :], axis=-3)]
            W = Ey * xs[..., :, None, :]
            if row is Row.BEFORE:
                W = xp.concat([W[..., 1:, :, :], xp.zeros_like(W[..., :1, :, :])], axis=-3)
            dgs = [_crossing_channels(xp, W)]
            if s:
                head, reach = self.table((row, s, e)), self.table(("reach", s, e))
                near, far = xs * head, y[..., :s, :] * reach
                dnear, dfar = P[..., s:e, :s] @ far, xp.matrix_transpose(P[..., s:e, :s]) @ near
                dxs = dxs + dnear * head
                dys.insert(0, dfar * reach)
                crossed = after if row is Row.BEFORE else suffix
                dgs[0] = dgs[0] + crossed(xp, near * dnear)
                dgs.insert(0, before(xp, far * dfar))
            dx.append(dxs)
            dy, dg = dy + _rows_of(xp, dys, C), dg + _rows_of(xp, dgs, C)
        return xp.concat(dx, axis=-2), dy, dg


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
    C = W.shape[-1]
    later = xp.triu(xp.ones((C, C), dtype=W.dtype, device=device(W)))
    return xp.sum(xp.tril(later @ W, k=-1), axis=-1, keepdims=True)


def _crossing_channels(xp: Namespace, W: Array) -> Array:
    """The same for every channel: (..., c, c, K) -> (..., c, K)."""
    c = W.shape[-2]
    later = xp.flip(xp.cumulative_sum(xp.flip(W, axis=-3), axis=-3), axis=-3)
    lower = xp.tril(xp.ones((c, c), dtype=W.dtype, device=device(W)), k=-1)[:, :, None]
    return xp.sum(later * lower, axis=-2)


def _rows_of(xp: Namespace, parts: list[Array], C: int) -> Array:
    """Parts one under the other, zeros below to C rows."""
    n = C - sum(p.shape[-2] for p in parts)
    if n:
        like = parts[0]
        parts = [*parts, xp.zeros((*like.shape[:-2], n, like.shape[-1]), dtype=like.dtype, device=device(like))]
    return xp.concat(parts, axis=-2)
