"""Tokens before others of the same sequence: shifts in time, across the start of a call, and the last tokens.

x (..., T, D) are all tokens, past (..., S, D) the S inputs before the first one, oldest first. In a ragged batch one
packed row holds all sequences one after the other, and past is (N, S, D).

    before(x, i)_t = x_{t-i}        from `past`, or 0, before the first token of a sequence
    last(x, S)     = the last S of [past, x]
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import numpy as np

from ..runtime.arrays import Array, Namespace, constant, count_dtype, device
from ..runtime.held import cached


class Table(NamedTuple):
    """Of each token of a packed row: its number in its sequence, its sequence; of each sequence: start and length."""

    place: np.ndarray  # (T,)
    owner: np.ndarray  # (T,)
    start: np.ndarray  # (N,)
    length: np.ndarray  # (N,)


@cached
def table(offsets: tuple[int, ...]) -> Table:
    """The table of cu_seqlens."""
    edges = np.array(offsets, np.int64)
    start, length = edges[:-1], np.diff(edges)
    owner = np.repeat(np.arange(len(length)), length)
    return Table(np.arange(int(edges[-1])) - start[owner], owner, start, length)


class Sequences(NamedTuple):
    """How the tokens of a call belong together; offsets: cu_seqlens, None for one sequence in each batch row."""

    xp: Namespace
    offsets: tuple[int, ...] | None = None

    def before(self, x: Array, past: Array | None, i: int) -> Array:
        """x_{t-i} of every token, i >= 0."""
        xp, T = self.xp, x.shape[-2]
        if not i:
            return x
        if self.offsets is None:
            S = 0 if past is None else past.shape[-2]
            both = _between_zeros(xp, x, i, 0) if past is None else xp.concat([past, x], axis=-2)
            return both[..., max(S, i if past is None else S) - i :, :][..., :T, :]
        at, shape = table(self.offsets), x.shape
        flat = xp.reshape(x, shape[-2:])
        shifted = _between_zeros(xp, flat, i, 0)[:T, :]
        own = self._mask(x, at.place >= i)
        earlier = xp.zeros_like(flat)
        if past is not None:
            S = past.shape[-2]
            earlier = self._take(past, np.where(at.place < i, at.owner * S + np.clip(S + at.place - i, 0, S - 1), 0))
        return xp.reshape(xp.where(own, shifted, earlier), shape)

    def before_vjp(self, d: Array, past: Array | None, i: int) -> tuple[Array, Array | None]:
        """(dx, dpast)."""
        xp, T = self.xp, d.shape[-2]
        S = 0 if past is None else past.shape[-2]
        if not i:
            return d, None if past is None else xp.zeros_like(past)
        if self.offsets is None:
            dx = _between_zeros(xp, d[..., min(i, T) :, :], 0, min(i, T))
            if past is None:
                return dx, None
            return dx, _between_zeros(xp, d[..., : min(i, T), :], S - i, max(i - T, 0))
        at = table(self.offsets)
        flat = xp.reshape(d, d.shape[-2:])
        later = _between_zeros(xp, flat, 0, i)[i:, :]
        follows = np.arange(T) + i < (at.start + at.length)[at.owner]
        dx = xp.reshape(xp.where(self._mask(d, follows), later, xp.zeros_like(later)), d.shape)
        if past is None:
            return dx, None
        token = np.arange(S)[None] - (S - i)  # the place at which slot s is i before
        there = (token >= 0) & (token < np.minimum(i, at.length)[:, None])
        source = np.where(there, at.start[:, None] + token, 0)
        return dx, self._where_taken(flat, source, there)

    def last(self, x: Array, past: Array | None, S: int) -> Array:
        """The last S of [past, x], zeros before: (..., S, D), or (N, S, D)."""
        xp = self.xp
        if self.offsets is None:
            T = x.shape[-2]
            if T >= S:
                return xp.concat([x[..., T - S :, :]], axis=-2)
            return _between_zeros(xp, x, S - T, 0) if past is None else xp.concat([past[..., T:, :], x], axis=-2)
        place, at = self._places(S), table(self.offsets)
        flat = xp.reshape(x, x.shape[-2:])
        own = self._where_taken(flat, np.where(place >= 0, at.start[:, None] + place, 0), place >= 0)
        if past is None:
            return own
        slots = np.arange(len(at.start))[:, None] * S + np.clip(S + place, 0, max(S - 1, 0))
        return own + self._where_taken(_flat(xp, past), np.where(place < 0, slots, 0), place < 0)

    def last_vjp(self, d: Array, x: Array, past: Array | None) -> tuple[Array, Array | None]:
        """(dx, dpast); d (..., S, D)."""
        xp, T, S = self.xp, x.shape[-2], d.shape[-2]
        if self.offsets is None:
            dx = _between_zeros(xp, d[..., max(S - T, 0) :, :], max(T - S, 0), 0)
            return dx, None if past is None else _between_zeros(xp, d[..., : max(S - T, 0), :], min(S, T), 0)
        at = table(self.offsets)
        slot = S - (at.length[at.owner] - at.place)
        flat = _flat(xp, d)
        dx = self._where_taken(flat, np.where(slot >= 0, at.owner * S + slot, 0), slot >= 0)
        dx = xp.reshape(dx, x.shape)
        if past is None:
            return dx, None
        to = np.arange(S)[None] - at.length[:, None]
        return dx, self._where_taken(flat, np.where(to >= 0, np.arange(len(to))[:, None] * S + to, 0), to >= 0)

    def _places(self, S: int) -> np.ndarray:
        """(N, S): the place of the token in each slot of the final state, below 0 before the first one."""
        return table(self.offsets or ()).length[:, None] - S + np.arange(S)[None]

    def _take(self, x: Array, rows: np.ndarray) -> Array:
        xp = self.xp
        index = constant(xp, rows.reshape(-1), count_dtype(xp), device(x))
        return xp.take(_flat(xp, x), index, axis=0)

    def _where_taken(self, x: Array, rows: np.ndarray, there: np.ndarray) -> Array:
        """Rows of x (R, D) where `there`, else 0: (*rows.shape, D)."""
        xp, D = self.xp, x.shape[-1]
        if not x.shape[0] or not rows.size:
            return xp.zeros((*rows.shape, D), dtype=x.dtype, device=device(x))
        found = self._take(x, rows)
        found = xp.where(self._mask(x, there.reshape(-1)), found, xp.zeros_like(found))
        return xp.reshape(found, (*rows.shape, D))

    def _mask(self, like: Array, each: np.ndarray) -> Array:
        """A column of booleans."""
        return constant(self.xp, each, self.xp.bool, device(like))[:, None]


def _between_zeros(xp: Namespace, x: Any, before: int, after: int) -> Array:
    """x (..., T, D) padded with tokens of zeros on both sides."""
    lead, D = x.shape[:-2], x.shape[-1]
    zeros = [xp.zeros((*lead, n, D), dtype=x.dtype, device=device(x)) for n in (before, after)]
    return xp.concat([zeros[0], x, zeros[1]], axis=-2)


def _flat(xp: Namespace, x: Array) -> Array:
    """Rows (R, D), also of D = 0."""
    return xp.reshape(x, (prod(x.shape[:-1]), x.shape[-1]))
