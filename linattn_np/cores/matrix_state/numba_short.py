"""Short sequences in compiled loops: which take the recurrent form, how it is shared out, and how it is done again.

A form is chosen by the length of its own sequence: the same sequence gives the same bits alone and among others.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof, c_char
from math import prod

import numpy as np

from ...ground import threads
from ...ground.namespace import cast
from ..kinds import Erase
from .inputs import Inputs, Plan
from .numba_step import step_tasks
from .numba_step_table import TOKENS, layout, memory
from .numba_table import AT, BLOCKS, DIRECT, IN_STATE, OUT, OUT_STATE, QUERIES, Table, sequences, sizes

SHORT = 31  # tokens that are walked one by one where the caller leaves the form open: less than a chunk
BLOCK = 128  # value columns: a state is shared out in multiples of it
FEW_BYTES = 2**22  # of states that go by; below, threads cost more than they give


def is_stepwise(x: Inputs, plan: Plan, rows: np.ndarray) -> np.ndarray:
    """Whether each sequence is walked token by token: asked for, or short, or in no other form."""
    if plan.chunk_size == 1 or x.gv is not None or (x.u is not None and x.erase is not Erase.NONE):
        return np.ones(len(rows), bool)
    return (rows[:, 2] - rows[:, 1] <= SHORT) & (plan.chunk_size is None)


def in_place(x: Inputs, plan: Plan, state: np.ndarray | None) -> bool:
    """Whether the final state is written where the initial one lies: nothing else that is read may lie there."""
    if not plan.overwrite_state or state is None or state.dtype != plan.dtype:
        return False
    if state.strides[-1] != state.itemsize or not _is_spread_out(state):
        return False
    return not any(y is not None and np.may_share_memory(state, y) for y in x)


def _is_spread_out(y: np.ndarray) -> bool:
    """Whether no two elements share memory: each axis steps over all that lies inside it."""
    extent = y.itemsize
    for stride, size in sorted((abs(stride), size) for stride, size in zip(y.strides, y.shape, strict=True)):
        if size > 1 and stride < extent:
            return False
        extent += stride * (size - 1)
    return True


class Steps:
    """A call of the recurrent form: all but where its arrays lie."""

    def __init__(self, x: Inputs, plan: Plan, state: np.ndarray | None, rows: np.ndarray):
        dtype, H, K, V = np.dtype(plan.dtype), x.v.shape[-2], x.k.shape[-1], x.v.shape[-1]
        tokens, states, self.rows = int((rows[:, 2] - rows[:, 1]).max()), len(rows) * H, rows
        self.few = states * K * V * dtype.itemsize * tokens < FEW_BYTES
        share = -(-(1 if self.few else threads.num_threads()) // states)
        columns = min(V, max(1, -(-V // (share * BLOCK))) * BLOCK)
        self.n = sizes(x, plan, TOKENS, columns, state is not None)
        self.n[DIRECT] = state is not None and state.dtype == dtype and state.strides[-1] == dtype.itemsize
        self.w, self.bytes = layout(K, int(self.n[QUERIES]), min(tokens, TOKENS), dtype.itemsize)
        self.kernel, self.one, self.scale = step_tasks(dtype), dtype.type(1), dtype.type(plan.scale)
        self.tasks = states * int(self.n[BLOCKS])

    def run(self, numbers: np.ndarray) -> None:
        """Walk the sequences of the arrays that the table `numbers` describes."""
        if self.few:
            at = memory(self.bytes)
            self.kernel(self.one, self.scale, numbers, self.n, self.rows, self.w, at, 0, self.tasks)
            return

        def task(first: int, last: int) -> None:
            at = memory(self.bytes)
            self.kernel(self.one, self.scale, numbers, self.n, self.rows, self.w, at, first, last)

        threads.run(task, self.tasks, threads.num_threads())


class Again:
    """A call of the recurrent form for other arrays of the same shapes, strides and dtypes.

    given   the arrays that the call's arrays lie in
    """

    def __init__(self, x: Inputs, plan: Plan, state: np.ndarray, given: Sequence[np.ndarray]):
        (*lead, T, _, V), self.dtype, table = x.v.shape, np.dtype(plan.dtype), Table(x)
        rows = sequences(plan, prod(lead))
        self.out_shape = None if x.q is None else (*lead, T, table.asking, V)
        self.out_dtype, self.xp = x.v.dtype, plan.xp
        self.overwrite, self.in_place = plan.overwrite_state, in_place(x, plan, state)
        if self.out_shape:
            table.tokens(OUT, np.empty(self.out_shape, self.dtype), table.asking)
        table.states(IN_STATE, state)
        table.states(OUT_STATE, state if self.in_place else np.empty(state.shape, self.dtype))
        self.steps, self.numbers = Steps(x, plan, state, rows), table.numbers
        self.extents = [_extent(y) for y in given]
        self.state_extent = _extent(state)
        self.sources = [(row, *_source(int(at), given)) for row, at in enumerate(self.numbers[:, AT])
                        if at and row not in (IN_STATE, OUT, OUT_STATE)]  # fmt: skip

    def __call__(self, given: Sequence[np.ndarray], state: np.ndarray) -> tuple[np.ndarray | None, np.ndarray] | None:
        """(out, final state); None where the state shares memory with what is read."""
        at, own = [_address(y) for y in given], _address(state)
        end = state
        if self.in_place:
            low, high = own + self.state_extent[0], own + self.state_extent[1]
            for y, (first, last) in zip(at, self.extents, strict=True):
                if y + first < high and low < y + last:
                    return None
        else:
            end = np.empty(state.shape, self.dtype)
        numbers = self.numbers.copy()
        for row, source, offset in self.sources:
            numbers[row, AT] = at[source] + offset
        numbers[IN_STATE, AT], numbers[OUT_STATE, AT] = own, own if self.in_place else _address(end)
        out = None
        if self.out_shape:
            out = np.empty(self.out_shape, self.dtype)
            numbers[OUT, AT] = _address(out)
        self.steps.run(numbers)
        if self.overwrite and not self.in_place:
            state[...] = end
            end = state
        return None if out is None else cast(self.xp, out, self.out_dtype), end


def again(x: Inputs, plan: Plan, state: np.ndarray | None, given: Sequence[np.ndarray]) -> Again | None:
    """The same call for other arrays, where nothing but addresses will differ: x are views of `given`."""
    if state is None or not plan.causal or plan.sequences[0].row is not None or not all(y.size for y in given):
        return None
    (T,), rows = {s.stop - s.start for s in plan.sequences}, sequences(plan, 1)
    views = all(y is None or (y.size and _source(_address(y), given) is not None) for y in x)
    if not T or not views or not is_stepwise(x, plan, rows).all() or state.size == 0:
        return None
    return Again(x, plan, state, given)


def _address(y: np.ndarray) -> int:
    """Of the first element: the quick way where memory is dense and may be written, else the one for all."""
    try:
        return addressof(c_char.from_buffer(y))
    except (TypeError, ValueError):
        return y.__array_interface__["data"][0]


def _extent(y: np.ndarray) -> tuple[int, int]:
    """First byte and the one after the last, from the address on."""
    reach = [stride * (size - 1) for stride, size in zip(y.strides, y.shape, strict=True)]
    return sum(r for r in reach if r < 0), sum(r for r in reach if r > 0) + y.itemsize


def _source(at: int, given: Sequence[np.ndarray]) -> tuple[int, int] | None:
    """(index, offset in bytes) of the array that an address lies in."""
    for i, y in enumerate(given):
        low, high = _extent(y)
        own = _address(y)
        if own + low <= at < own + high:
            return i, at - own
    return None
