"""Calls of levels.py on NumPy arrays: sequences, arrays, tasks and threads."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import numpy as np

from ...ops.cpu.formulas import zeros
from ...ops.cpu.sums import sum_to
from ...runtime.arrays import cast
from ...runtime.constants import host_constants
from ...runtime.pieces.memory import empty, new_flag, up
from ...runtime.pieces.registers import NARROW
from ...runtime.pieces.run import conversions, launch_of
from ...runtime.pieces.vectors import lane
from ..types import LevelState, Plan
from . import levels, levels_vjp
from .forward import in_place, is_direct, shares_of
from .levels import LEVELS, RUN, TRACE
from .tasks import Table

NUMBERS = [n for n, name in enumerate(levels.ARRAYS) if name not in ("position", "flag", "end_position")]


class Saved(NamedTuple):
    """Residuals: inputs, plan and initial state."""

    x: Any
    plan: Plan
    state: LevelState | None

    def backward(self, dout: np.ndarray | None, dstate: LevelState | None) -> tuple[Any, LevelState | None]:
        """Gradients of every input, and of the initial state."""
        return backward(self, dout, dstate)


class LevelCall:
    """The arrays of a call and their sizes: x the inputs of the read-out (..., T, heads, width)."""

    def __init__(self, x: Any, plan: Plan, state: LevelState | None):
        (*self.lead, _, self.H, self.V), self.x, self.plan = x.v.shape, x, plan
        self.dtype, self.K, self.levels = np.dtype(plan.dtype), x.k.shape[-1], x.lam.shape[-1]
        self.heads = self.H if x.q is None else max(self.H, x.q.shape[-2])
        self.owners = [len(plan.sequences)] if plan.is_ragged else self.lead
        self.sequences = host_constants.once(("levels", prod(self.lead), plan.sequences), self._sequences)
        self.c = int((self.sequences[:, 3] - self.sequences[:, 2]).max(initial=0))
        self.rows, self.state = Table(levels.ARRAYS), state
        for name, heads in (("q", self.heads), ("k", self.H), ("v", self.H), ("g", self.H), ("beta", self.H),
                            ("lam", self.H)):  # fmt: skip
            self.rows.tokens(name, getattr(x, name), heads)
        if state is not None:
            self.states("state", state.S)
            self.positions("position", state.position)

    def _sequences(self) -> np.ndarray:
        """Rows of levels.SEQUENCE."""
        if self.plan.is_ragged:
            table = [(0, s.row, s.start, s.stop) for s in self.plan.sequences]
        else:
            (s,) = self.plan.sequences
            table = [(n, n, s.start, s.stop) for n in range(prod(self.lead))]
        return np.array(table, np.int64).reshape(-1, 4)

    @property
    def state_shape(self) -> tuple[int, ...]:
        """(..., H, levels, K, V)"""
        return (*self.owners, self.H, self.levels, self.K, self.V)

    def states(self, name: str, S: np.ndarray | None) -> None:
        """Levels (..., H, levels, K, V), as states of levels K rows."""
        if S is not None:
            self.rows.states(name, S.reshape((*S.shape[:-3], S.shape[-3] * S.shape[-2], S.shape[-1])))

    def positions(self, name: str, position: np.ndarray) -> None:
        """Whole numbers of the sequences (...)."""
        position = np.asarray(position, np.int64).reshape((1, -1, 1, 1))
        self.rows.put(name, position, position.strides, 1)

    def new_tokens(self, name: str, heads: int, width: int) -> np.ndarray:
        """A new array of tokens (..., T, heads, width)."""
        y = empty((*self.x.v.shape[:-2], heads, width), self.dtype)
        self.rows.tokens(name, y, heads)
        return y

    def run(self, kernel: Any, words: str = "", queries: int = 0, **more: Any) -> np.ndarray:
        """A kernel over all sequences and heads; returns its flag."""
        flag = new_flag()
        self.rows.put("flag", flag.reshape((1, 1, 1, 1)), (8, 8, 8, 8), 1)
        W, c, N = lane(self.dtype), max(self.c, 1), len(self.sequences)
        delta, level_rows = self.x.beta is not None, self.levels * self.K
        sizes = {"c": c, "c_queries": c * max(queries, 1), "K_lanes": up(self.K, W), "width_lanes": NARROW * W,
                 "level_lanes": up(self.levels, W), "level_rows": level_rows, "trace_rows": min(c, TRACE) * level_rows,
                 "mark_rows": (min(c, RUN) - 1) // TRACE * level_rows, "start_rows": (c - 1) // RUN * level_rows,
                 "read_rows": (min(c, TRACE) if "adjoint" in words else 1) * self.levels, "levels": self.levels,
                 "gradient_rows": (self.levels + 1) * (self.K + 1), "N": N, "four": 4}  # fmt: skip
        values = {"H": self.H, "K": self.K, "V": self.V, "levels": self.levels, "queries": queries,
                  "scale": self.plan.scale, "sequences": self.sequences, "delta": int(delta),
                  "given": int(self.state is not None), "positioned": int(self.state is not None)} | more  # fmt: skip
        found = frozenset(("delta",) * delta + tuple(words.split()))
        layout = LEVELS.layout(sizes, self.dtype, found)
        words_of = found | conversions(self.rows.numbers[NUMBERS], self.dtype.name)
        tasks = np.arange(N if kernel is levels.advance else N * self.H)
        operations = 0.0 if kernel is levels.advance else 6.0 * self.c * level_rows * self.V * len(tasks)
        shares = shares_of(tasks, [*range(len(tasks) + 1)], operations)
        launch = launch_of(kernel, LEVELS, self.dtype.name, layout, values, words_of, *shares)
        launch.with_arrays(LEVELS, self.rows.numbers, self.rows).run()
        return flag


def forward(x: Any, plan: Plan, state: LevelState | None) -> tuple[np.ndarray | None, LevelState, Saved] | None:
    """(out, final state, residuals); None where a sequence has more tokens than levels count.

    A final state that is not returned has no numbers.
    """
    call, has_end = LevelCall(x, plan, state), plan.returns_state or x.q is None
    mine = state is not None and in_place(x, plan, state.S)
    out = None if x.q is None else call.new_tokens("out", call.heads, call.V)
    end = LevelState(np.broadcast_to(np.zeros(1, call.dtype), call.state_shape), np.zeros(call.owners, np.int64))
    if has_end:
        own = plan.overwrite and state is not None and state.position.dtype == np.int64
        end = LevelState(
            state.S if mine else empty(call.state_shape, call.dtype),
            state.position if own else empty(tuple(call.owners), np.dtype(np.int64)),
        )
        call.states("end", end.S)
        call.positions("end_position", end.position)
    both = [y for y in (None if state is None else state.S, end.S if has_end else None) if y is not None]
    direct = all(is_direct(y, call.dtype) for y in both)
    flag = call.run(levels.forward, queries=0 if out is None else call.heads // call.H, has_end=int(has_end),
                    in_place=int(mine), is_direct=int(direct))  # fmt: skip
    if flag[0]:
        return None
    if has_end:
        call.run(levels.advance)
    return None if out is None else cast(plan.xp, out, x.v.dtype), end, Saved(x, plan, state)


def backward(saved: Saved, dout: np.ndarray | None, dstate: LevelState | None) -> tuple[Any, LevelState | None]:
    """Gradients of every input, and of the initial state."""
    x, plan, state = saved
    call, reads = LevelCall(x, plan, state), x.q is not None and dout is not None
    H, K, d = call.H, call.K, dict[str, Any]()
    for name, heads, width in (("k", H, K), ("v", H, call.V), ("g", H, 1), ("lam", H, call.levels),
                               *([("beta", H, 1)] if x.beta is not None else []),
                               *([("q", call.heads, K)] if reads else [])):  # fmt: skip
        d[name] = call.new_tokens("d" + name, heads, width)
    if reads:
        call.rows.tokens("dout", dout, call.heads)
    if dstate is not None:
        call.states("dend", dstate.S)
    begin = None if state is None else state._replace(S=empty(call.state_shape, call.dtype))
    call.states("dstate", None if begin is None else begin.S)
    call.run(levels_vjp.backward, "adjoint", call.heads // H if reads else 0, has_dend=int(dstate is not None))
    if x.q is not None and not reads:
        d["q"] = zeros(x.q.shape, call.dtype)
    return x._replace(**{name: _of_groups(y, getattr(x, name).shape[-2]) for name, y in d.items()}), begin


def _of_groups(d: np.ndarray, heads: int) -> np.ndarray:
    """Gradients summed over the heads that share one of `heads`."""
    *lead, H, D = d.shape
    if heads == H:
        return d
    return sum_to(d.reshape((*lead, heads, H // heads, D)), (*lead, heads, 1, D)).reshape((*lead, heads, D))
