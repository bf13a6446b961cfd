"""The parallel form in tiles: each tile of readers against each earlier tile of writers, without forming states.

    x^_I S_in = (x^_I (.) m) S_0 + sum over J < I of (x^_I (.) m_IJ) y^_J^T w_J

m_IJ is the decay over the tiles between J and I. Time grows as T^2, memory as T. This is the schedule of Lightning
Attention-1 (arXiv 2307.14995), extended to every decay and erase, with its adjoint.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ...runtime.arrays import Array, cast, sum_to
from ...runtime.shapes import Chunk
from ..heads import take
from ..types import Inputs, Plan
from .one_chunk import GradientSums, OneChunk, Reader, chunk_cotangents, chunk_factors, chunk_fwd, chunk_gradients


def forward(
    core: Inputs, plan: Plan, table: list[Chunk], S: Array, put: Callable[[int, Array], None]
) -> tuple[Array, Array]:
    """(final state, S_0); outputs go to put(start, out)."""
    tiles: list[OneChunk] = []
    for chunk in table:
        x = take(plan.xp, core, chunk.start, chunk.stop, plan.dtype)
        factors = chunk_factors(plan.xp, x, plan)
        f = chunk_fwd(plan.xp, factors, plan, lambda decayed: _read(plan, tiles, decayed, S))
        tiles.append(_writers_only(f, chunk, put))
    return _final_state(plan, tiles, S), S


def _writers_only(f: OneChunk, chunk: Chunk, put: Callable[[int, Array], None]) -> OneChunk:
    """Output a tile and drop its residuals; later tiles need only its writers and decay."""
    if f.out is not None:
        put(chunk.start, f.out)
    return f._replace(out=None, erased=None, erase_reader=None, query_reader=None, grams=[], read=None)


def _read(plan: Plan, tiles: list[OneChunk], decayed: Array, S: Array) -> Array:
    """x^ S_in for the readers that follow `tiles`."""
    T, m, mv, total = plan.xp.matrix_transpose, None, None, 0.0
    for f in reversed(tiles):
        for w in f.writers:
            total = total + _scaled((_scaled(decayed, m) @ T(w.decayed)) @ w.w, mv)
        m, mv = _scaled(f.D.weight(), m), _scaled(f.Dv.weight(), mv)
    return total + _scaled(_scaled(decayed, m) @ S, mv)


def _final_state(plan: Plan, tiles: list[OneChunk], S: Array) -> Array:
    """S_T = sum over J of (y^_J (.) m)^T w_J, plus the decayed S_0."""
    T, m, mv, total = plan.xp.matrix_transpose, None, None, 0.0
    for f in reversed(tiles):
        for w in f.writers:
            total = total + sum_to(plan.xp, _scaled(T(_scaled(w.decayed, m)) @ w.w, mv), S.shape)
        m, mv = _scaled(f.D.weight(), m), _scaled(f.Dv.weight(), mv)
    return total + _scaled(_scaled_rows(plan, S, m), mv)


def backward(
    core: Inputs,
    plan: Plan,
    table: list[Chunk],
    S: Array,
    dout: Array | None,
    dS: Array,
    put: Callable[[int, dict[str, Array]], None],
) -> Array:
    """dS_0; gradients go to put(start, gradients)."""
    xp = plan.xp
    tiles: list[OneChunk] = []
    for chunk in table:
        x = take(xp, core, chunk.start, chunk.stop, plan.dtype)
        tiles.append(chunk_fwd(xp, chunk_factors(xp, x, plan), plan, lambda decayed: _read(plan, tiles, decayed, S)))
    readers: list[list[Reader]] = []  # of the tiles done so far, nearest first
    grads: list[GradientSums] = []
    for (start, stop), f in zip(reversed(table), reversed(tiles), strict=True):
        d = None if dout is None else cast(xp, dout[..., start:stop, :], plan.dtype)
        reverse_carry = partial(_reverse_carry, plan, tiles[len(tiles) - len(readers) :], readers, dS)
        r, g = chunk_cotangents(xp, f, plan, d, reverse_carry)
        readers.insert(0, r)
        grads.insert(0, g)
    pairs = _Pairs(plan, tiles, readers, S.shape[:-2])
    dS_0 = pairs.accumulate(S, dS)
    for n, (chunk, f) in enumerate(zip(table, tiles, strict=True)):
        g = chunk_gradients(xp, f, readers[n], grads[n], pairs.dread[n], pairs.dwrite[n])
        for name, D, crossed in (("g", f.D, pairs.crossed[n]), ("gv", f.Dv, pairs.crossed_values[n])):
            if name in g and not isinstance(crossed, float):
                g.add(name, D.broadcast_to_tokens(crossed))
        put(chunk.start, g)
    return dS_0


def _reverse_carry(plan: Plan, tiles: list[OneChunk], readers: list[list[Reader]], dS: Array, decayed: Array) -> Array:
    """y^ dS_out for the writers that precede `tiles`."""
    T, m, mv, total = plan.xp.matrix_transpose, None, None, 0.0
    shape = (*dS.shape[:-2], decayed.shape[-2], dS.shape[-1])
    for f, rs in zip(tiles, readers, strict=True):
        for r in rs:
            total = total + sum_to(plan.xp, _scaled((_scaled(decayed, m) @ T(r.decayed)) @ r.c, mv), shape)
        m, mv = _scaled(f.D.weight(), m), _scaled(f.Dv.weight(), mv)
    return total + _scaled(_scaled(decayed, m) @ dS, mv)


class _Pairs:
    """Gradients of all products reader x writer of different tiles, S_0 being a writer before and dS_T a reader after.

    The product of tile I with tile J also crosses the gates of every tile between them: `crossed`, by channel.
    """

    def __init__(self, plan: Plan, tiles: list[OneChunk], readers: list[list[Reader]], lead: tuple[int, ...]):
        self.plan, self.tiles, self.readers, self.lead = plan, tiles, readers, lead
        self.dread: list[list[Array]] = [[0.0] * len(r) for r in readers]
        self.dwrite: list[list[Array]] = [[0.0] * len(f.writers) for f in tiles]
        self.crossed: list[Array] = [0.0] * len(tiles)
        self.crossed_values: list[Array] = [0.0] * len(tiles)

    def accumulate(self, S: Array, dS: Array) -> Array:
        """Sum over all pairs; returns dS_0."""
        xp, T, n = self.plan.xp, self.plan.xp.matrix_transpose, len(self.tiles)
        dS_0 = 0.0
        for i in range(n + 1):
            m, mv, across = None, None, []  # across: (keys, values) products of i with each j, nearest first
            for j in reversed(range(i)):
                across.append(self._pair(i, j, m, mv) if i < n else self._last(j, m, mv, dS))
                f = self.tiles[j]
                m, mv = _scaled(f.D.weight(), m), _scaled(f.Dv.weight(), mv)
            if i < n:
                keys, values = 0.0, 0.0
                for k, r in enumerate(self.readers[i]):
                    c = _scaled(r.c, mv)
                    d = _scaled(c @ T(S), m)
                    self.dread[i][k] = self.dread[i][k] + d
                    dS_0 = dS_0 + sum_to(xp, T(_scaled(r.decayed, m)) @ c, S.shape)
                    keys = keys + self._total(r.decayed * d)
                    values = values + self._total(c * (_scaled(r.decayed, m) @ S))
            else:
                carried = _scaled(_scaled_rows(self.plan, dS, m), mv)
                dS_0 = dS_0 + carried
                keys = T(xp.sum(S * carried, axis=-1, keepdims=True))
                values = xp.sum(S * carried, axis=-2, keepdims=True)
            for j, (k, v) in zip(range(i), reversed(across), strict=True):  # products with tiles before j cross tile j
                self.crossed[j] = self.crossed[j] + keys
                self.crossed_values[j] = self.crossed_values[j] + values
                keys, values = keys + k, values + v
        return dS_0

    def _total(self, products: Array) -> Array:
        """Sum over the tokens of a tile and the readers that share a state: (..., 1, D)."""
        xp = self.plan.xp
        return sum_to(xp, xp.sum(products, axis=-2, keepdims=True), (*self.lead, 1, products.shape[-1]))

    def _pair(self, i: int, j: int, m: Array | None, mv: Array | None) -> tuple[Array, Array]:
        xp, T, keys, values = self.plan.xp, self.plan.xp.matrix_transpose, 0.0, 0.0
        for k, r in enumerate(self.readers[i]):
            c, decayed = _scaled(r.c, mv), _scaled(r.decayed, m)
            for n, w in enumerate(self.tiles[j].writers):
                dGamma = c @ T(w.w)
                d = _scaled(dGamma @ w.decayed, m)
                self.dread[i][k] = self.dread[i][k] + d
                self.dwrite[j][n] = self.dwrite[j][n] + sum_to(xp, T(dGamma) @ decayed, w.decayed.shape)
                keys = keys + self._total(r.decayed * d)
                if mv is not None:
                    values = values + self._total(c * ((decayed @ T(w.decayed)) @ w.w))
        return keys, values

    def _last(self, j: int, m: Array | None, mv: Array | None, dS: Array) -> tuple[Array, Array]:
        T, keys, values = self.plan.xp.matrix_transpose, 0.0, 0.0
        for n, w in enumerate(self.tiles[j].writers):
            d = _scaled(_scaled(w.w, mv) @ T(dS), m)
            self.dwrite[j][n] = self.dwrite[j][n] + sum_to(self.plan.xp, d, w.decayed.shape)
            keys = keys + self._total(w.decayed * d)
            if mv is not None:
                values = values + self._total(_scaled(w.w, mv) * (_scaled(w.decayed, m) @ dS))
        return keys, values


def _scaled(x: Array, m: Array) -> Array:
    """x (.) m; None stands for ones."""
    return m if x is None else x if m is None else x * m


def _scaled_rows(plan: Plan, S: Array, m: Array | None) -> Array:
    """diag(m) S."""
    return S if m is None else S * plan.xp.matrix_transpose(m)
