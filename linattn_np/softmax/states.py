"""Caches of a call, the final one and those at positions, and the gradients that come through them.

A cache at a position is that of the tokens before it, in as many slots as the final one has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..core import Computation, StatesAt
from ..ops.host import has_compiler
from ..runtime.arrays import Array, cast, device, is_numpy
from ..runtime.shapes import Sequence, prefixes
from . import cache, heads, sequences
from .types import Inputs, SoftmaxPlan


class GivesStates(Computation):
    """A computation of this core, whose caches at positions follow from its tokens."""

    def gives_states(self, fn: str, x: Any, plan: Any, wanted: str | None) -> bool:
        """All of them."""
        return True


def ends(plan: SoftmaxPlan, x: Inputs, state: Any) -> Any:
    """The final cache, or a StatesAt; of a cache that is not returned the shapes alone."""
    at = at_positions(plan, x, state)  # first: the state may be overwritten
    is_read = plan.returns_state or plan.overwrite or x.q is None or at is not None
    end = final_state(plan, x, state) if is_read else cache.shapes_after(plan, x, state)
    return end if at is None else StatesAt(end, at)


def needs_end(plan: SoftmaxPlan, x: Any) -> bool:
    """Whether a call, or its pullback, has a use for the final cache."""
    return plan.returns_state or plan.gradients or plan.states_at is not None or x.q is None


def final_state(plan: SoftmaxPlan, x: Inputs, state: Any) -> Any:
    """The cache after all tokens; a row for each sequence of a ragged batch."""
    L, found = cache.slots_after(plan, state, x.v.shape[-3]), []
    if plan.overwrite and is_numpy(plan.xp) and not plan.is_ragged:
        if (compiled := kernels(plan, x)) is not None and compiled.appends(plan, state):
            return compiled.append(plan, x, state, state)
        return cache.append_in_place(plan, x, state)
    for _, own, row in sequences.each_sequence(plan, x, state):
        found.append(after(plan, own, row, L))
    return sequences.joined_rows(plan, found)


def kernels(plan: SoftmaxPlan, x: Inputs, *sizes: int) -> Any:
    """The compiled loops that write tokens x to slots; None for other arrays, if there are no slots, and for maps."""
    if not is_numpy(plan.xp) or not has_compiler() or x.w is not None or 0 in (x.k.size, x.v.size, *sizes):
        return None
    from .cpu import calls

    return calls


def after(plan: SoftmaxPlan, x: Inputs, row: Any, L: int) -> Any:
    """The cache of one sequence after the tokens x; row: the one before them, None without one."""
    if (compiled := kernels(plan, x, L)) is not None:
        return compiled.append(plan, x, row, compiled.new_cache(plan, x, L))
    return cache.after(plan, x, begin(plan, x, row), L)


def at_positions(plan: SoftmaxPlan, x: Inputs, state: Any) -> Any:
    """The caches at plan.states_at, (..., n, L, ...) or (n, L, ...) of a ragged batch; None without positions."""
    if plan.states_at is None:
        return None
    L, found = cache.slots_after(plan, state, x.v.shape[-3]), []
    for s in prefixes_of(plan):
        own, row = heads.tokens_of(x, s), heads.row_of(plan, x, state, s)
        found.append(after(plan, own, row, L))
    return type(found[0])(*(along_positions(plan, x, list(parts)) for parts in zip(*found, strict=True)))


def prefixes_of(plan: SoftmaxPlan) -> list[Sequence]:
    """The tokens before each position; without any those before position 0, for their shapes."""
    return prefixes(plan.sequences, plan.states_at or (0,))


def along_positions(plan: SoftmaxPlan, x: Any, rows: list[Array]) -> Array:
    """One part of the caches of `prefixes_of`, with the axis of the positions behind the batch axes of x."""
    xp, lead = plan.xp, x.v.ndim - 3
    axis = 0 if plan.is_ragged else lead
    y = xp.stack([xp.reshape(row, row.shape[lead:]) for row in rows] if plan.is_ragged else rows, axis=axis)
    return y if plan.states_at else y[(slice(None),) * axis + (slice(0, 0), ...)]


def begin(plan: SoftmaxPlan, x: Inputs, row: Any) -> Any:
    """The cache that a sequence begins with."""
    return cache.empty(plan.xp, x, plan.dtype) if row is None else row


def positions_of(plan: SoftmaxPlan, s: Sequence) -> list[tuple[int, Sequence]]:
    """(number, tokens before it) of the positions in a sequence."""
    return [(n, p) for n, p in enumerate(prefixes(plan.sequences, plan.states_at or ())) if p.row == s.row]


def row_at(plan: SoftmaxPlan, x: Any, states: Any, n: int) -> Any:
    """The cache at one position, with the batch axes of x."""
    if plan.is_ragged:
        return heads.row_of(plan, x, states, Sequence(n, 0, 0))
    place = (slice(None),) * (x.v.ndim - 3) + (n, ...)
    return type(states)(*(cast(plan.xp, y[place], plan.dtype) for y in states))


def with_zeros(plan: SoftmaxPlan, d: Array, T: int, axis: int) -> Array:
    """Gradients of the first tokens as gradients of T tokens."""
    if d.shape[axis] == T:
        return d
    shape = list(d.shape)
    shape[axis] = T - d.shape[axis]
    return plan.xp.concat([d, plan.xp.zeros(tuple(shape), dtype=d.dtype, device=device(d))], axis=axis)


def with_state(plan: SoftmaxPlan, x: Inputs, state: Any, dstate: Any, d: tuple[Inputs, Any]) -> tuple[Inputs, Any]:
    """Adds the gradients through the final cache and through the caches at positions."""
    dend, dat = dstate if isinstance(dstate, StatesAt) else (dstate, None)
    found = []
    for s, own, row in sequences.each_sequence(plan, x, state):
        dx, drow = sequences.zeros(plan, own, row)
        through = [] if dend is None else [(own, heads.row_of(plan, x, dend, s))]
        if dat is not None:
            through += [(heads.tokens_of(x, p), row_at(plan, x, dat, n)) for n, p in positions_of(plan, s)]
        for tokens, d_after in through:
            more, dbegin = cache.after_vjp(plan, tokens, begin(plan, own, row), d_after)
            T = own.v.shape[-3]
            dx = Inputs(*(y if z is None else y + with_zeros(plan, z, T, -2 if n in ("g", "beta") else -3)
                          for n, y, z in zip(Inputs._fields, dx, more, strict=True)))  # fmt: skip
            drow = None if row is None else type(row)(*(y + z for y, z in zip(drow, dbegin, strict=True)))
        found.append((dx, drow))
    sums = sequences.gathered(plan, x, found)
    dx = Inputs(*(None if y is None else cast(plan.xp, y, plan.dtype) + z for y, z in zip(d[0], sums[0], strict=True)))
    if state is None:
        return dx, None
    return dx, type(state)(*(y + z for y, z in zip(d[1], sums[1], strict=True)))


def each(f: Callable[[Any], Any], states: Any) -> Any:
    """f of a cache, of both parts of a StatesAt; None stays."""
    if isinstance(states, StatesAt):
        return StatesAt(*(each(f, S) for S in states))
    return None if states is None else f(states)
