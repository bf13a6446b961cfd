"""The compiled averages in log space: calls on NumPy arrays as rows, workers and kernels."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from ...ops.cpu.formulas import dense
from ...ops.host import write
from ...ops.sums import over_tokens
from ...runtime import threads
from ...runtime.constants import constant_zeros
from ...runtime.pieces.memory import empty, working
from ...runtime.pieces.registers import NARROW
from ...runtime.pieces.run import over_matrices
from ...runtime.pieces.vectors import BYTES
from ..types import AverageInputs, Plan
from . import log_average
from .spans import SPAN, spans_of

SEGMENT = 32  # tokens between kept states
BLOCK = 1024  # bytes of a row: the channels of a job
State = tuple[np.ndarray, np.ndarray, np.ndarray]  # S, n, m


def forward(plan: Plan, x: AverageInputs, state: State | None) -> tuple[np.ndarray, State, np.ndarray | None]:
    """(out, the final state, the states before every segment of tokens if a backward follows)."""
    call = Call(plan, x)
    out, end = empty(x.v.shape, call.dtype), call.state()
    marks = working((call.places * log_average.PARTS, call.D), call.dtype) if plan.gradients else None
    call.run(log_average.forward, {"out": out, "marks": marks}, state, end)
    return out, end, marks


def backward(
    plan: Plan, x: AverageInputs, marks: np.ndarray, dout: np.ndarray | None, dstate: State | None
) -> tuple[AverageInputs, State]:
    """(gradients of the inputs, of the initial state)."""
    call = Call(plan, x)
    (dk, dv), begin = (empty(x.v.shape, call.dtype) for _ in "kv"), call.state()
    dw, du = (working((call.owners, call.D), call.dtype) for _ in "wu")
    d = np.broadcast_to(constant_zeros(np, (call.D,), call.dtype, "cpu"), x.v.shape) if dout is None else dout
    call.run(log_average.backward, {"dk": dk, "dv": dv, "dw": dw, "du": du, "dout": d, "marks": marks}, dstate, begin)
    return x._replace(k=dk, v=dv, w=over_tokens(np, dw), u=over_tokens(np, du)), begin


class Call:
    """The arrays of a call as rows, its sequences and its blocks of channels."""

    def __init__(self, plan: Plan, x: AverageInputs):
        (*lead, T, self.D), self.plan, self.x = x.v.shape, plan, x
        self.dtype, self.count = np.dtype(plan.dtype), prod(lead) * T
        self.each = BLOCK // self.dtype.itemsize
        own = spans_of(plan, tuple(lead), T, SEGMENT)
        self.owners, self.places, self.spans, self.shape = own.count, own.places, own.table, (*own.lead, self.D)

    def state(self) -> State:
        """Memory for a state, or its gradient."""
        return empty(self.shape, self.dtype), empty(self.shape, self.dtype), empty(self.shape, self.dtype)

    def rows(self, y: np.ndarray) -> np.ndarray:
        """An array in the dtype of the computation, as rows of numbers side by side."""
        if y.dtype != self.dtype or not (y.strides[-1] == y.itemsize or y.shape[-1] == 1):
            y = dense(y, self.dtype)
        return y.reshape(-1, self.D)

    def run(self, kernel: Any, made: dict[str, Any], start: State | None, end: State) -> None:
        """A kernel over all its jobs."""
        if not self.D or not self.owners:
            zero = constant_zeros(np, (1,), self.dtype, "cpu")
            for y in (*end, *(y for name, y in made.items() if name not in ("dout", "marks"))):
                write(np, y, zero)
            return
        blocks = -(-self.D // self.each)
        jobs = self.owners * blocks
        workers, column = min(threads.num_threads(), jobs), NARROW * BYTES // self.dtype.itemsize
        given = {n: y for n, y in made.items() if y is not None} | self.x._asdict()
        given |= {f"end_{n}": y for n, y in zip("Snm", end, strict=True)}
        given |= {} if start is None else {f"start_{n}": y for n, y in zip("Snm", start, strict=True)}
        held = {n: self.rows(y) for n, y in given.items()}
        scratch = workers * (SEGMENT + 1) * log_average.KEPT if "dk" in held else 0
        held |= {"kept": working((scratch, column), self.dtype)} if scratch else {}
        sizes = {"jobs": jobs, "workers": workers, "blocks": blocks, "each": self.each, "segment": SEGMENT,
                 "has_start": int(start is not None), "scale": self.plan.scale, "count": self.count, "D": self.D,
                 "one": 1, "owners": self.owners, "marked": len(held.get("marks", ())), "scratch": scratch,
                 "column": column, "span": SPAN}  # fmt: skip
        over_matrices(kernel, log_average.AVERAGE, sizes | held | {"spans": self.spans}, workers, self.dtype.name)
