"""A call as one packed row of spans, and the gradients of its arrays."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ....core import Computed
from ....ops.sums import sum_of_groups
from ....runtime.arrays import Array, Namespace, cast, device, is_cupy
from ....runtime.shapes import Sequence
from ... import core
from ...types import Inputs, LevelState, Plan, both
from .blocks import Span, live


class LevelInputs(NamedTuple):
    """Arrays (..., T, heads, width), or their gradients."""

    q: Array  # (..., T, Hq, K)  None: write without reading
    k: Array  # (..., T, Hk, K)
    v: Array  # (..., T, H, V)
    g: Array  # (..., T, H, 1)
    beta: Array  # (..., T, H, 1)  None: nothing is erased
    lam: Array  # (..., T, H, levels)

    @property
    def core(self) -> Inputs:
        """The core's inputs of a call without levels."""
        return Inputs(self.q, self.k, self.v, self.g, r=None if self.beta is None else self.k, beta=self.beta)

    def each(self, f: Callable[[Array], Array]) -> LevelInputs:
        """f of every array that is given."""
        return LevelInputs(*(None if y is None else f(y) for y in self))


class Row(NamedTuple):
    """A call as one packed row: arrays (tokens, heads, width), spans of its sequences, S (N, H, levels, K, V) or None.

    q, v, g, beta and lam have H heads; S the compute dtype, and v too, as the outputs of the core then have, but for
    heads.py.
    """

    fn: str
    wanted: str | None
    plan: Plan
    x: LevelInputs
    spans: tuple[Span, ...]
    S: Any

    @property
    def levels(self) -> int:
        """Levels of lam, and of a state: 0 .. levels - 1, and 1 .. levels."""
        return int(self.x.lam.shape[-1])

    @property
    def state_shape(self) -> tuple[int, ...]:
        """(N, H, levels, K, V)"""
        return (len(self.spans), self.x.v.shape[-2], self.levels, self.x.k.shape[-1], self.x.v.shape[-1])

    def constant(self, y: np.ndarray) -> Array:
        """A table in the compute dtype."""
        return cast(self.plan.xp, self.mask(y), self.plan.dtype)

    def mask(self, y: np.ndarray) -> Array:
        """A table in its own dtype."""
        return self.plan.xp.asarray(y, device=device(self.x.v))

    def zeros(self, shape: tuple[int, ...]) -> Array:
        """Zeros in the compute dtype."""
        return self.plan.xp.zeros(shape, dtype=self.plan.dtype, device=device(self.x.v))

    def run(self, x: Inputs, sequences: tuple[Sequence, ...], S: Any, ends: bool) -> Computed:
        """The core's forward; ends: its final state is used."""
        plan = self.plan._replace(sequences=sequences, returns_state=ends, has_state=S is not None, overwrite=False)
        return core.forward(self.fn, x, plan, S, self.wanted)


class Gradients(dict[str, Any]):
    """Gradients by name, (tokens, heads, width), "S" for that of the initial state: sums over the parts of a call."""

    def add(self, **more: Array | None) -> None:
        """Adds those that are not None."""
        for name, d in more.items():
            if d is not None:
                self[name] = d if name not in self else self[name] + d

    def add_core(self, d: Inputs, place: Callable[[Array], Array] = lambda y: y) -> None:
        """Adds gradients of k, g and beta; place: from the tokens of a call to all."""
        each = {"k": both(d.k, d.r), "g": d.g, "beta": d.beta}
        self.add(**{name: None if y is None else place(y) for name, y in each.items()})


def packed(fn: str, x: LevelInputs, plan: Plan, state: LevelState | None, wanted: str | None, dtype: Any) -> Row:
    """The call as one row, values in `dtype`.   Raises ValueError for more tokens than levels count."""
    xp, (*lead, T, _, _), H = plan.xp, x.v.shape, heads_out(x)
    flat = x.each(lambda y: xp.reshape(y, (prod(y.shape[:-2]), *y.shape[-2:])))
    flat = flat.each(lambda y: grouped(xp, y, H, -2))._replace(k=flat.k)
    sequences = plan.sequences if plan.is_ragged else [Sequence(None, b * T, (b + 1) * T) for b in range(prod(lead))]
    S, first = None, [0] * len(sequences)
    if state is not None:
        S = cast(xp, xp.reshape(state.S, (len(sequences), *state.S.shape[-4:])), plan.dtype)
        first = [int(n) for n in xp.reshape(state.position, (-1,))]
    spans = tuple(Span(s.start, s.stop, n) for s, n in zip(sequences, first, strict=True))
    row = Row(fn, wanted, plan, flat._replace(v=cast(xp, flat.v, dtype)), spans, None)
    _check_levels(row)
    return row if S is None else row._replace(S=of_live(row, grouped(xp, S, H, -4), first))


def _check_levels(row: Row) -> None:
    most = max((s.last for s in row.spans if s.stop > s.start), default=0)
    if most > (1 << row.levels) >> 1:
        need = int(most - 1).bit_length() + 1
        raise ValueError(f"{row.fn}: lam has {row.levels} levels, expected at least {need} for {most} tokens")


def of_live(row: Row, S: Array, at: Items[int]) -> Array:
    """S (N, H, levels, K, V) with zeros in the levels that are empty at these positions."""
    is_live = row.mask(live(np.array(at, np.int64), row.levels)[:, None, :, None, None])
    return row.plan.xp.where(is_live, S, row.zeros(()))


def heads_out(x: LevelInputs) -> int:
    """Heads of the output: a group of them may read one state, or have one query."""
    return max(x.v.shape[-2], 0 if x.q is None else x.q.shape[-2])


def grouped(xp: Namespace, y: Array, H: int, axis: int) -> Array:
    """Each head once for every head of its group."""
    return y if y.shape[axis] == H else xp.repeat(y, H // y.shape[axis], axis=axis)


def of_groups(xp: Namespace, d: Array, heads: int, axis: int) -> Array:
    """The transpose of grouped."""
    if d.shape[axis] == heads:
        return d
    if is_cupy(xp) and axis == -2:
        return sum_of_groups(xp, d, heads)
    at = d.ndim + axis
    return xp.sum(xp.reshape(d, (*d.shape[:at], heads, d.shape[at] // heads, *d.shape[at + 1 :])), axis=at + 1)


def taken(row: Row, y: Array, at: np.ndarray) -> Array:
    """The entries `at` of the first axis; all of them: y itself."""
    return (
        y if at.size == y.shape[0] and (at == np.arange(at.size)).all() else row.plan.xp.take(y, row.mask(at), axis=0)
    )


def placed(row: Row, y: Array, at: np.ndarray, n: int) -> Array:
    """y as the entries `at` of n, the others 0: the transpose of taken."""
    if at.size == n and (at == np.arange(n)).all():
        return y
    index = np.full(n, y.shape[0])
    index[at] = np.arange(y.shape[0])
    zeros = row.plan.xp.zeros((1, *y.shape[1:]), dtype=y.dtype, device=device(y))
    more = row.plan.xp.concat([y, zeros], axis=0)
    return row.plan.xp.take(more, row.mask(index), axis=0)


def tokens_of(spans: Items[Span]) -> np.ndarray:
    """The tokens of spans, as indices of the row."""
    return np.concatenate([np.arange(s.start, s.stop) for s in spans] or [np.zeros(0, np.int64)])


def in_order(spans: Items[Span]) -> tuple[Span, ...]:
    """The spans in a row that has only their tokens."""
    ends = np.cumsum([0, *(s.stop - s.start for s in spans)]).tolist()
    return tuple(Span(a, a + s.stop - s.start, s.first) for a, s in zip(ends[:-1], spans, strict=True))


def part(row: Row, spans: list[int]) -> Row:
    """The row of some of the spans."""
    own = [row.spans[n] for n in spans]
    x = row.x.each(lambda y: taken(row, y, tokens_of(own)))
    S = None if row.S is None else taken(row, row.S, np.array(spans))
    return row._replace(x=x, spans=in_order(own), S=S)
