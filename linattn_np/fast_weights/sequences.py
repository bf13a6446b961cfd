"""From the arrays of a call to rows that are computed together, and back.

Inside the core tokens are (N, H, T, D): heads before tokens, one batch axis. A part is a set of rows that have seen as
many tokens, or one sequence of a ragged batch. A state of the caller is W - W_0 of each array (states.py).
"""

from __future__ import annotations

import functools
from math import prod
from typing import Any, NamedTuple

from ..ops.host import repeated_heads
from ..ops.product import multiple
from ..ops.sums import sum_of_groups
from ..runtime.arrays import Array, Namespace, cast, device, dtype_name
from ..runtime.recorder import refuse
from .fused import appended
from .recorded import added, copied, counts, difference, each, zeros_like
from .types import FastPlan, Inputs, State, Tokens, Tree, each_of


class Part(NamedTuple):
    """Tokens start..stop of rows that have seen n tokens."""

    rows: list[int]  # of the batch, and of the states
    start: int
    stop: int
    n: int

    @property
    def is_empty(self) -> bool:
        return self.start == self.stop


class Call:
    """The arrays of a call, by parts."""

    def __init__(self, plan: FastPlan, x: Inputs, state: Any, is_cast: bool = True) -> None:
        """is_cast: tokens are wanted in the compute dtype, not in the caller's."""
        self.plan, self.x, self.xp, self.lead, self.is_cast = plan, x, plan.xp, x.v.shape[:-3], is_cast
        self.is_ragged = not plan.sequences or plan.sequences[0].row is not None
        self.tokens = Tokens(x.q, x.k, x.v, x.rates).each(self._entered)
        wide = [self._matrix(cast(plan.xp, w, plan.dtype)) for w in (*x.weights, *x.slow)]
        self.weights, self.slow = tuple(wide[: len(x.weights)]), tuple(wide[len(x.weights) :])
        self.state = None if state is None else [self._flat(S) for S in state]
        self.parts = self._parts(state)
        self.order = [row for part in self.parts for row in part.rows]
        self._initial: dict[int, Tree] = {}

    def _parts(self, state: Any) -> list[Part]:
        batch = len(self.plan.sequences) if self.is_ragged else prod(self.lead)
        found = [0] * batch
        if state is not None and state[-1] is not None:
            refuse("the number of tokens so far decides where mini-batches end")
            found = [int(n) for n in self.xp.reshape(state[-1], (-1,))]
        if self.is_ragged:
            return [Part([n], s.start, s.stop, seen)
                    for n, (s, seen) in enumerate(zip(self.plan.sequences, found, strict=True))]  # fmt: skip
        ((_, start, stop),) = self.plan.sequences
        return [Part([i for i, m in enumerate(found) if m == n], start, stop, n) for n in dict.fromkeys(found) or (0,)]

    # tokens

    def _entered(self, y: Array) -> Array:
        """(..., T, H, D) as (N, H, T, D)."""
        xp, H = self.xp, self.x.v.shape[-2]
        y = repeated_heads(xp, cast(xp, y, self.plan.dtype) if self.is_cast else y, H)
        return xp.permute_dims(xp.reshape(y, (prod(y.shape[:-3]), *y.shape[-3:])), (0, 2, 1, 3))

    def left(self, y: Array) -> Array:
        """The inverse."""
        y = self.xp.permute_dims(y, (0, 2, 1, 3))
        return self.xp.reshape(y, (*self.lead, *y.shape[1:]))

    def cut(self, y: Array, part: Part) -> Array:
        """The rows and tokens of a part."""
        y = y[:, :, part.start : part.stop, :]
        return y if self.is_ragged else self._rows(y, part)

    def entered_gradient(self, dout: Array | None, part: Part) -> Any:
        """The cotangent of the outputs of a part."""
        return None if dout is None or self.x.q is None else self.cut(self._entered(scaled(self.plan, dout)), part)

    def joined(self, each: list[Array]) -> Array:
        """An array of all tokens from those of the parts."""
        if self.is_ragged:
            return appended(self.xp, each)
        return self._in_order(each)

    # rows

    def _rows(self, y: Array, part: Part) -> Array:
        return y if len(part.rows) == y.shape[0] else take(self.xp, y, part.rows)

    def _in_order(self, each: list[Array]) -> Array:
        """The rows of all parts, in the order of the batch."""
        if len(each) == 1:
            return each[0]
        return take(self.xp, self.xp.concat(each, axis=0), sorted(range(len(self.order)), key=self.order.__getitem__))

    # arrays that learn, and states

    def _matrix(self, w: Array) -> Array:
        """A row (H, M) as (H, 1, M)."""
        return w[..., None, :] if w.ndim == 2 else w

    def initial(self, part: Part) -> Tree:
        """The initial arrays, for each row."""
        if (rows := len(part.rows)) not in self._initial:
            self._initial[rows] = tuple(self.xp.broadcast_to(w, (rows, *w.shape)) for w in self.weights)
        return self._initial[rows]

    def _flat(self, S: Array) -> Array:
        """A part of a state with one axis of rows; floats in the compute dtype."""
        lead = len(self.lead)
        if S is None:
            return None
        S = S if self.is_ragged else self.xp.reshape(S, (prod(S.shape[:lead]), *S.shape[lead:]))
        return S if "int" in dtype_name(S) else cast(self.xp, S, self.plan.dtype)

    def state_of(self, part: Part, state: Any, is_gradient: bool = False) -> State:
        """The State of a part: initial + W - W_0, of gradients without initial. state: flat arrays, None for zeros."""
        initial = self.initial(part)
        P, xp = len(initial), self.xp
        slots, has_sums = slots_of(self.plan.kind, P)
        c = self.plan.learner.window - 1
        if state is None:
            zero = each(zeros_like, xp, initial) if slots else ()
            start, like = each(zeros_like if is_gradient else copied, xp, initial), initial[0]
            lead, widths = like.shape[:2], (self.x.k.shape[-1], self.x.v.shape[-1], 1)
            zeros = functools.partial(xp.zeros, dtype=like.dtype, device=device(like))
            sums = zeros((*lead, 1, 1)) if has_sums else None
            past = tuple(zeros((*lead, c, n)) for n in widths if c)
            return State(part.n, start, start, (zero,) * slots, sums, past)
        own = [self._rows(S, part) for S in state[:-1]]
        wide = [S[..., None, :] if S.ndim == initial[0].ndim - 1 else S for S in own[: P * (2 + slots)]]
        trees = [tuple(wide[n : n + P]) for n in range(0, P * (2 + slots), P)]
        sums = own[-1][..., None, None] if has_sums else None
        past = (*own[-3:-1], own[-1][..., None]) if c else ()
        weights, anchor = (
            each(copied, xp, tree) if is_gradient else each(added, xp, initial, tree) for tree in trees[:2]
        )
        return State(part.n, anchor, weights, tuple(trees[2:]), sums, past)

    def begin(self, part: Part) -> State:
        """The state that a part begins with."""
        found = self.state_of(part, self.state)
        return found._replace(anchor=found.weights) if self.begins_anew(part) else found

    def begins_anew(self, part: Part) -> bool:
        """Whether the mini-batch of the first token begins at the weights, wherever the state's began."""
        return self.plan.learner.mini_batch == 1 and not part.is_empty

    def end(self, part: Part, end: State) -> list[Array]:
        """The parts of the state that a part ends with; one without tokens hands its own over."""
        if part.is_empty and self.state is not None:
            return [S if S is None else take(self.xp, S, part.rows) for S in self.state]
        if not self.plan.returns_state and self.x.q is not None:
            return self.parts_of(end, copied_parts=False)  # for their shapes alone
        anchor, weights = (each(difference, self.xp, tree, self.initial(part)) for tree in (end.anchor, end.weights))
        return self.parts_of(end._replace(anchor=anchor, weights=weights))

    def parts_of(self, s: State, copied_parts: bool = True) -> list[Array]:
        """The parts of the caller's state; rows without their axis of one."""
        xp = self.xp
        trees = (y for tree in (s.weights, s.anchor, *s.slots) for y in tree)
        found = [y[..., 0, :] if len(axes.split()) == 2 else y for axes, y in zip(self.plan.axes, trees, strict=False)]
        found += [] if s.sums is None else [s.sums[..., 0, 0]]
        found += [*s.past[:2], s.past[2][..., 0]] if s.past else []
        rows = found[0].shape[:1]
        length = None
        if self.state is None or self.state[-1] is not None:  # which the caller's state may not have
            length = counts(xp, s.n, tuple(rows), device(found[0]))
            length = length if self.state is None else cast(xp, length, self.state[-1].dtype)
        return [*(copied(xp, y) if copied_parts else y for y in found), length]

    def gathered(self, each: list[list[Array]]) -> Any:
        """The caller's state, from the parts of the states of all parts."""
        found = [None if parts[0] is None else self._in_order(list(parts)) for parts in zip(*each, strict=True)]
        if self.is_ragged:
            return self.plan.kind(*found)
        return self.plan.kind(*(None if S is None else self.xp.reshape(S, (*self.lead, *S.shape[1:])) for S in found))

    # gradients

    def gradient_of_end(self, part: Part, dstate: Any) -> State:
        """The gradient of the State that a part ends with."""
        flat, n = None if dstate is None else [self._flat(S) for S in dstate], part.n + part.stop - part.start
        return self.state_of(part._replace(n=n), flat, is_gradient=True)

    def gradients(self, each: list[Tokens], dweights: Tree, dslow: Tree) -> Inputs:
        """Gradients as arrays of the call, from those of the parts."""
        d = together(self.joined, each)
        d = each_of(lambda y, like: sum_of_groups(self.xp, self.left(y), like.shape[-2]), d, Tokens(*self.x[:4]))
        like = [w.shape for w in (*self.x.weights, *self.x.slow)]
        flat = [self.xp.reshape(y, shape) for y, shape in zip((*dweights, *dslow), like, strict=True)]
        return Inputs(*d, tuple(flat[: len(dweights)]), tuple(flat[len(dweights) :]))


def scaled(plan: FastPlan, y: Array) -> Array:
    """scale y, in the compute dtype"""
    return y if plan.scale == 1 else multiple(plan.xp, plan.scale, y, plan.dtype)


def together(join: Any, each: list[Tokens]) -> Tokens:
    """Tokens whose arrays are `join` of those of each."""
    return each_of(lambda *y: join(list(y)), *each)


def slots_of(kind: Any, P: int) -> tuple[int, bool]:
    """(how many arrays the optimiser keeps for each of P weights, whether there are sums) of a type of states."""
    has_sums, past = "mu" in kind._fields, 3 * ("k_past" in kind._fields)
    return (len(kind._fields) - 1 - has_sums - past) // P - 2, has_sums


def take(xp: Namespace, y: Array, rows: list[int]) -> Array:
    """Rows of an array."""
    return xp.take(y, xp.asarray(rows, dtype=xp.int64, device=device(y)), axis=0)
