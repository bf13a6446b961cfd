"""The decay of one chunk of C tokens: NONE, SCALAR or VECTOR behind one interface; arrays are (..., C, D).

With e^{g} the decay of one token, s(j, i) = g_{j+1} + ... + g_i is the log decay from j to i, and

    gram(x, y)_ij = sum_d x_id y_jd e^{s(j, i)_d}          read of writer j by reader i
    rows(P, y)_i  = sum_j P_ij y_j e^{s(j, i)}             gram's transpose in x
    cols(P, x)_j  = sum_i P_ij x_i e^{s(j, i)}             gram's transpose in y
    from_start(x)_i = x_i e^{s(start, i)}                  reader of the incoming state
    to_end(y)_j   = y_j e^{s(j, end)}                      writer j decayed to the end of the chunk
    carry(S)      = diag(e^{s(start, end)}) S              the state decayed to the end of the chunk

The state that a reader reads determines the path: to i for UPDATED and DECAYED, to i - 1 for PREVIOUS; the last two
exclude j = i. Every sum s is formed by adding its own terms, never as a difference of two long sums: exponents are
<= 0 if g is, nothing cancels, and g = -inf is a term like any other. Each f_vjp also returns the gradient of g, again
as sums of its own terms: dg_t sums every product whose path from j to i crosses t. docs/one_core.md derives both.
"""

from __future__ import annotations

import copy

from ...ops.gates import LOG_DECAY_FLOOR
from ...runtime.arrays import Array, Namespace, cast, device, keep_lower, sum_dtype, transposed_rows
from ..types import ReadState
from .cumulative import after, before, crossing, down, list_chunks, pad, pair_table, prefix, suffix, up


def decay_of(xp: Namespace, g: Array | None, dtype: object) -> NoDecay:
    """The decay of one chunk from its log decays: None, (..., C, 1) or (..., C, K)."""
    if g is None:
        return NoDecay(xp)
    return (ScalarDecay if g.shape[-1] == 1 else VectorDecay)(xp, g, dtype)


class NoDecay:
    """e^{s} = 1."""

    def __init__(self, xp: Namespace):
        self.xp = xp
        self.last_transposed: tuple[Array, Array] | None = None  # the last y and y^T

    def unstack(self, N: int) -> list[NoDecay]:
        """The decays of N chunks whose arrays are (..., N, C, D)."""
        return [self] * N

    def carry_part(self) -> NoDecay:
        """A decay with the table of `carry` alone."""
        return self

    def products(self, x: Array, y: Array, reads: ReadState) -> Array:
        """x_i . y_j for j <= i (j < i if strict), else 0."""
        if self.last_transposed is None or self.last_transposed[0] is not y:
            self.last_transposed = y, transposed_rows(self.xp, y)
        return keep_lower(self.xp, x @ self.last_transposed[1], reads.strict)

    def gram(self, x: Array, y: Array, reads: ReadState) -> Array:
        return self.products(x, y, reads)

    def rows(self, P: Array, y: Array, reads: ReadState) -> Array:
        return P @ y

    def cols(self, P: Array, x: Array, reads: ReadState) -> Array:
        return self.xp.matrix_transpose(P) @ x

    def gram_vjp(
        self, dGamma: Array, x: Array, y: Array, reads: ReadState, gram: Array | None = None
    ) -> tuple[Array, Array, Array | None]:
        """(dx, dy, dg) from the cotangent dGamma of gram(x, y, reads); `gram`: its value, if known."""
        dGamma = keep_lower(self.xp, dGamma, reads.strict)
        return dGamma @ y, self.xp.matrix_transpose(dGamma) @ x, None

    def from_start(self, x: Array, reads: ReadState) -> Array:
        return x

    def from_start_vjp(self, x: Array, dy: Array, reads: ReadState) -> tuple[Array, Array | None]:
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

    def broadcast_to_tokens(self, crossed: Array) -> Array | None:
        """Gradient of g from products (..., 1, D) whose paths cross the whole chunk: the same for every token."""
        return None


class ScalarDecay(NoDecay):
    """One log decay per token: g (..., C, 1)."""

    def __init__(self, xp: Namespace, g: Array, dtype: object):
        super().__init__(xp)
        self.dtype = dtype
        floor = xp.asarray(LOG_DECAY_FLOOR, dtype=g.dtype, device=device(g))
        self.g = cast(xp, xp.maximum(g, floor), sum_dtype(xp, g))
        self.tables: dict[object, Array] = {}

    def unstack(self, N: int) -> list[NoDecay]:
        return self._unstack(list_chunks(self.xp, self.g), {n: list_chunks(self.xp, y) for n, y in self.tables.items()})

    def carry_part(self) -> NoDecay:
        one = copy.copy(self)
        one.last_transposed, one.tables = None, {"all": self.table("all")}
        return one

    def _unstack(self, gs: list[Array], tables: dict[object, list[Array]]) -> list[NoDecay]:
        decays: list[NoDecay] = []
        for n, g in enumerate(gs):
            one = copy.copy(self)
            one.g, one.last_transposed = g, None
            one.tables = {name: parts[n] for name, parts in tables.items()}
            decays.append(one)
        return decays

    # tables of e^{s}, computed on first use

    def table(self, name: object) -> Array:
        if name not in self.tables:
            self.tables[name] = self._pairs(name) if isinstance(name, ReadState) else self._row(str(name))
        return self.tables[name]

    def _exp(self, s: Array) -> Array:
        return self.xp.exp(cast(self.xp, s, self.dtype))

    def _row(self, name: str) -> Array:
        """e^{s} of every token to one end of the chunk: (..., C, 1); "all" (..., 1, 1)."""
        xp = self.xp
        if name == "start":  # s(start, i)
            return self._exp(prefix(xp, self.g))
        if name == "start before":  # s(start, i - 1)
            return self._exp(before(xp, self.g))
        if name == "end":  # s(j, end), as the last row of all pairs
            return xp.matrix_transpose(self.table(ReadState.UPDATED)[..., -1:, :])
        return self.table("start")[..., -1:, :]  # "all": s(start, end)

    def _pairs(self, reads: ReadState) -> Array:
        """e^{s(j, i)}, 0 above the diagonal: (..., C, C)."""
        xp = self.xp
        if reads is ReadState.DECAYED:
            return keep_lower(xp, self.table(ReadState.UPDATED), strict=True)
        if reads is ReadState.PREVIOUS:
            return down(xp, self.table(ReadState.UPDATED))
        return pair_table(xp, self.g[..., 0], self._exp)

    def _table_unmasked(self, reads: ReadState) -> Array:
        """The table for a factor whose masked entries are 0 already: for DECAYED the unmasked diagonal is harmless."""
        return self.table(ReadState.UPDATED if reads is ReadState.DECAYED else reads)

    # the four functions and their transposes

    def gram(self, x: Array, y: Array, reads: ReadState) -> Array:
        return self.products(x, y, reads) * self._table_unmasked(reads)

    def rows(self, P: Array, y: Array, reads: ReadState) -> Array:
        return (P * self.table(reads)) @ y

    def cols(self, P: Array, x: Array, reads: ReadState) -> Array:
        return self.xp.matrix_transpose(P * self.table(reads)) @ x

    def gram_vjp(
        self, dGamma: Array, x: Array, y: Array, reads: ReadState, gram: Array | None = None
    ) -> tuple[Array, Array, Array | None]:
        dGamma = keep_lower(self.xp, dGamma, reads.strict)
        dproducts = dGamma * self._table_unmasked(reads)
        ds = dproducts * self.products(x, y, reads) if gram is None else dGamma * gram
        dg = crossing(self.xp, up(self.xp, ds) if reads is ReadState.PREVIOUS else ds)
        return dproducts @ y, self.xp.matrix_transpose(dproducts) @ x, dg

    def from_start(self, x: Array, reads: ReadState) -> Array:
        return x * self.table("start before" if reads is ReadState.PREVIOUS else "start")

    def from_start_vjp(self, x: Array, dy: Array, reads: ReadState) -> tuple[Array, Array | None]:
        dx = self.from_start(dy, reads)
        crossed = after if reads is ReadState.PREVIOUS else suffix  # g_t lies on the path to i when i > t, or i >= t
        return dx, crossed(self.xp, self._sum_shared(x * dx))

    def to_end(self, y: Array) -> Array:
        return y * self.table("end")

    def to_end_vjp(self, y: Array, dy: Array) -> tuple[Array, Array | None]:
        d = self.to_end(dy)
        return d, before(self.xp, self._sum_shared(y * d))  # g_t lies on the path from j when j < t

    def carry(self, S: Array) -> Array:
        return S * self.xp.matrix_transpose(self.table("all"))

    def carry_vjp(self, S: Array, dS: Array) -> tuple[Array, Array | None]:
        d = self.carry(dS)
        return d, self.broadcast_to_tokens(self.xp.matrix_transpose(self.xp.sum(S * d, axis=-1, keepdims=True)))

    def weight(self) -> Array | None:
        return self.table("all")

    def broadcast_to_tokens(self, crossed: Array) -> Array | None:
        crossed = self._sum_shared(crossed)
        return self.xp.broadcast_to(crossed, (*crossed.shape[:-2], self.g.shape[-2], crossed.shape[-1]))

    def _sum_shared(self, x: Array) -> Array:
        """Sum of a token's products over the channels that share one g."""
        return self.xp.sum(x, axis=-1, keepdims=True)


class VectorDecay(ScalarDecay):
    """One log decay per token and channel: g (..., C, K).

    The chunk is halved recursively down to single tokens. For a pair (i, j) in two neighbouring halves of h tokens the
    decay factors at their boundary: x_i e^{s(boundary, i)} times y_j e^{s(j, boundary)}, two factors <= 1, so that all
    pairs of two halves are one matrix product. C is padded to a power of two with zero tokens.
    """

    def __init__(self, xp: Namespace, g: Array, dtype: object):
        super().__init__(xp, g, dtype)
        self.C = g.shape[-2]
        self.padded = 1 << max(self.C - 1, 0).bit_length()

    def _sum_shared(self, x: Array) -> Array:
        return x

    def unstack(self, N: int) -> list[NoDecay]:
        tables = dict(self.tables)
        levels = [[list_chunks(self.xp, y, axis=-4) for y in level] for level in tables.pop("span sums", [])]
        parts = {name: list_chunks(self.xp, y, -3 if isinstance(name, str) else -4) for name, y in tables.items()}
        if levels:
            parts["span sums"] = [[tuple(y[n] for y in level) for level in levels] for n in range(N)]
        return self._unstack(list_chunks(self.xp, self.g), parts)

    def _halves(self, x: Array, h: int) -> tuple[Array, Array]:
        """First and second halves of all spans of 2 h tokens: two arrays (..., spans, h, D)."""
        x = pad(self.xp, x, self.padded)
        x = self.xp.reshape(x, (*x.shape[:-2], self.padded // (2 * h), 2, h, x.shape[-1]))
        return x[..., 0, :, :], x[..., 1, :, :]

    def _spans(self, first: Array | None, second: Array | None, whole: bool = False) -> Array:
        """The transpose of _halves: (..., C, D), with the padding if `whole`; None is zero."""
        xp, like = self.xp, second if first is None else first
        zero = xp.zeros_like(like)
        x = xp.stack([zero if first is None else first, zero if second is None else second], axis=-3)
        return xp.reshape(x, (*x.shape[:-4], self.padded, x.shape[-1]))[..., : self.padded if whole else self.C, :]

    def _levels(self) -> list[int]:
        """h = 1, 2, 4, ... up to half of the padded chunk."""
        return [1 << n for n in range(self.padded.bit_length() - 1)]

    def _blocks(self, P: Array) -> list[Array]:
        """The blocks of P with rows in second and columns in first halves, one array per level: (..., spans, h, h)."""
        xp, X, blocks = self.xp, _pad_square(self.xp, P, self.padded)[..., None, :, :], []
        for h in reversed(self._levels()):
            blocks.append(X[..., h:, :h])
            X = xp.stack([X[..., :h, :h], X[..., h:, h:]], axis=-3)
            X = xp.reshape(X, (*X.shape[:-4], self.padded // h, h, h))
        return blocks[::-1]

    def _pairs(self, reads: ReadState) -> Array:
        raise AssertionError("a vector decay has no table of pairs: E has a third index, the channel")

    def _span_sums(self) -> list[tuple[Array, Array, Array]]:
        """For spans of 1, 2, 4, ... C tokens, (..., spans, h, K): s(start, i), s(start, i - 1) and s(j, end) of a span.

        Each level adds to the previous one the total of the neighbouring half.
        """
        if "span sums" not in self.tables:
            xp, g = self.xp, pad(self.xp, self.g, self.padded)[..., None, :]
            levels = [(g, xp.zeros_like(g), xp.zeros_like(g))]
            while levels[-1][0].shape[-2] < self.padded:
                to, upto, rest = ((y[..., 0::2, :, :], y[..., 1::2, :, :]) for y in levels[-1])
                first, second = to[0][..., -1:, :], to[1][..., -1:, :]
                levels.append(
                    (
                        xp.concat([to[0], to[1] + first], axis=-2),
                        xp.concat([upto[0], upto[1] + first], axis=-2),
                        xp.concat([rest[0] + second, rest[1]], axis=-2),
                    )
                )
            self.tables["span sums"] = levels
        return self.tables["span sums"]

    def _row(self, name: str) -> Array:
        if name == "all":
            return self.table("start")[..., -1:, :]
        level = self._span_sums()[-1]
        return self._exp(level[("start", "start before", "end").index(name)][..., 0, : self.C, :])

    def from_boundary(self, h: int, reads: ReadState) -> Array:
        """e^{s(boundary, i)} of the second halves, to i - 1 if PREVIOUS."""
        name = ("from_boundary", h, reads is ReadState.PREVIOUS)
        if name not in self.tables:
            sums = self._span_sums()[h.bit_length() - 1][1 if reads is ReadState.PREVIOUS else 0]
            self.tables[name] = self._exp(sums[..., 1::2, :, :])
        return self.tables[name]

    def to_boundary(self, h: int) -> Array:
        """e^{s(j, boundary)} of the first halves."""
        name = ("to_boundary", h)
        if name not in self.tables:
            self.tables[name] = self._exp(self._span_sums()[h.bit_length() - 1][2][..., 0::2, :, :])
        return self.tables[name]

    def gram(self, x: Array, y: Array, reads: ReadState) -> Array:
        xp, T = self.xp, self.xp.matrix_transpose
        diagonal = pad(xp, xp.sum(x * y, axis=-1, keepdims=True), self.padded)[..., None]  # (..., C, 1, 1)
        G = xp.zeros_like(diagonal) if reads.strict else diagonal
        for h in self._levels():
            near = self._halves(x, h)[1] * self.from_boundary(h, reads)
            block = near @ T(self._halves(y, h)[0] * self.to_boundary(h))
            A, D = G[..., 0::2, :, :], G[..., 1::2, :, :]
            if A.shape != block.shape:
                A, D = xp.broadcast_to(A, block.shape), xp.broadcast_to(D, block.shape)
            G = xp.concat([xp.concat([A, xp.zeros_like(A)], axis=-1), xp.concat([block, D], axis=-1)], axis=-2)
        return G[..., 0, : self.C, : self.C]

    def rows(self, P: Array, y: Array, reads: ReadState) -> Array:
        out = 0.0 if reads.strict else _diagonal(self.xp, P) * y
        for h, block in zip(self._levels(), self._blocks(P), strict=True):
            far = self._halves(y, h)[0] * self.to_boundary(h)
            out = out + self._spans(None, (block @ far) * self.from_boundary(h, reads))
        return out if self._levels() or not reads.strict else self.xp.zeros_like(y)

    def cols(self, P: Array, x: Array, reads: ReadState) -> Array:
        return self.gram_vjp(P, x, x, reads)[1]

    def gram_vjp(
        self, dGamma: Array, x: Array, y: Array, reads: ReadState, gram: Array | None = None
    ) -> tuple[Array, Array, Array | None]:
        xp, T = self.xp, self.xp.matrix_transpose
        p = xp.zeros_like(dGamma[..., :1]) if reads.strict else _diagonal(xp, dGamma)
        dx, dy, crossed = p * y, p * x, _Crossed(self, reads)
        for h, block in reversed(list(zip(self._levels(), self._blocks(dGamma), strict=True))):
            from_boundary, to_boundary = self.from_boundary(h, reads), self.to_boundary(h)
            near, far = self._halves(x, h)[1] * from_boundary, self._halves(y, h)[0] * to_boundary
            dnear, dfar = block @ far, T(block) @ near
            dx = dx + self._spans(None, dnear * from_boundary)
            dy = dy + self._spans(dfar * to_boundary, None)
            crossed.descend(h, far * dfar, near * dnear)
        return dx, dy, crossed.total(dx)


class _Crossed:
    """Gradient of g from the products of all levels, largest first.

    A product of readers i of a second half crosses g_t for t from the half's first row to i: a sum over i >= t in that
    half; one of writers j of a first half crosses t > j in it. Both are passed down from spans to halves: products
    wholly in the other half are added once for the whole half, the others are split further.
    """

    def __init__(self, D: VectorDecay, reads: ReadState):
        self.D, self.inclusive = D, reads is not ReadState.PREVIOUS
        self.whole: Array = 0.0  # (..., spans, 1, K): crossed by every token of a span
        self.readers: Array | None = None  # products still to be summed over i >= t (or i > t) of their span
        self.writers: Array | None = None  # over j < t

    def descend(self, h: int, writers: Array, readers: Array) -> None:
        """From spans of 2 h to their halves, then the products of this level: (..., spans, h, K) each."""
        D, xp = self.D, self.D.xp
        if self.readers is None:
            self.readers, self.writers = D._spans(None, readers, whole=True), D._spans(writers, None, whole=True)
            self.whole = xp.zeros_like(self.readers[..., :1, :][..., None, :])
            self.whole = xp.concat([self.whole, self.whole], axis=-3)
            return
        later = xp.sum(D._halves(self.readers, h)[1], axis=-2, keepdims=True)
        earlier = xp.sum(D._halves(self.writers, h)[0], axis=-2, keepdims=True)
        both = xp.stack([self.whole + later, self.whole + earlier], axis=-3)
        self.whole = xp.reshape(both, (*both.shape[:-4], D.padded // h, 1, both.shape[-1]))
        self.readers = self.readers + D._spans(None, readers, whole=True)
        self.writers = self.writers + D._spans(writers, None, whole=True)

    def total(self, like: Array) -> Array:
        """(..., C, K)."""
        D, xp = self.D, self.D.xp
        if self.readers is None:
            return xp.zeros_like(like)
        whole = self.whole[..., 0, :]
        return (whole + self.readers if self.inclusive else whole)[..., : D.C, :]


def _diagonal(xp: Namespace, P: Array) -> Array:
    """P_ii as a column: (..., C, C) -> (..., C, 1)."""
    eye = xp.eye(P.shape[-1], dtype=P.dtype, device=device(P))
    return xp.sum(P * eye, axis=-1, keepdims=True)


def _pad_square(xp: Namespace, P: Array, n: int) -> Array:
    """(..., C, C) with zeros below and to the right, to n x n."""
    if P.shape[-1] == n:
        return P
    P = pad(xp, P, n)
    return xp.matrix_transpose(pad(xp, xp.matrix_transpose(P), n))
